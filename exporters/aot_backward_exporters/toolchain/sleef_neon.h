/* What at::vec calls of SLEEF on aarch64. torch's sleef.h is generated on the machine that builds torch, and declares only the functions of that one. */
#if defined(__aarch64__) && !defined(__ARM_FEATURE_SVE)
#include <arm_neon.h>
#define ONE(name, accuracy) \
  extern "C" float32x4_t Sleef_##name##f4_##accuracy(float32x4_t); \
  extern "C" float64x2_t Sleef_##name##d2_##accuracy(float64x2_t);
#define TWO(name, suffix) \
  extern "C" float32x4_t Sleef_##name##f4##suffix(float32x4_t, float32x4_t); \
  extern "C" float64x2_t Sleef_##name##d2##suffix(float64x2_t, float64x2_t);
ONE(acos, u10) ONE(acosh, u10) ONE(asin, u10) ONE(asinh, u10) ONE(atan, u10) ONE(atanh, u10) ONE(cos, u10) ONE(cosh, u10) ONE(erf, u10)
ONE(erfc, u15) ONE(exp, u10) ONE(exp2, u10) ONE(expm1, u10) ONE(lgamma, u10) ONE(log, u10) ONE(log10, u10) ONE(log1p, u10) ONE(log2, u10)
ONE(sin, u10) ONE(sinh, u10) ONE(tan, u10) ONE(tanh, u10)
TWO(atan2, _u10) TWO(copysign, ) TWO(fmod, ) TWO(hypot, _u05) TWO(nextafter, ) TWO(pow, _u10)
#undef ONE
#undef TWO
#endif
