/* Included before every source file: binds to the oldest version of glibc's functions, so that libraries built on a new system load on older ones
 * (glibc 2.27 and later). The older versions are the same code but for errno (pow, hypot), or lay in other files of glibc until 2.34 (dlopen,
 * pthread_once). src/older_glibc.c has those that cannot be bound so. */
#if (defined(__x86_64__) || defined(__aarch64__)) && defined(__linux__) && __has_include(<gnu/libc-version.h>)
#define OLDER_GLIBC 1
#ifdef __x86_64__
#define OLDER(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#else
#define OLDER(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
OLDER(dladdr);
OLDER(dlclose);
OLDER(dlerror);
OLDER(dlopen);
OLDER(dlsym);
OLDER(exp);
OLDER(exp2);
OLDER(fmod);
OLDER(hypot);
OLDER(hypotf);
OLDER(log);
OLDER(log2);
OLDER(pow);
OLDER(pthread_getspecific);
OLDER(pthread_key_create);
OLDER(pthread_once);
OLDER(pthread_setspecific);
#undef OLDER
#endif
