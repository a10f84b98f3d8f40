/* What at::vec calls of SLEEF on aarch64. torch's sleef.h is generated on the
 * machine that builds torch, and declares that one's functions alone. */
#if defined(__aarch64__) && !defined(__ARM_FEATURE_SVE)
#include <arm_neon.h>
#define AOTB_ONE(name, accuracy)                                               \
  extern "C" float32x4_t Sleef_##name##f4_##accuracy(float32x4_t);             \
  extern "C" float64x2_t Sleef_##name##d2_##accuracy(float64x2_t);
#define AOTB_TWO(name, suffix)                                                 \
  extern "C" float32x4_t Sleef_##name##f4##suffix(float32x4_t, float32x4_t);   \
  extern "C" float64x2_t Sleef_##name##d2##suffix(float64x2_t, float64x2_t);
AOTB_ONE(acos, u10)
AOTB_ONE(acosh, u10) AOTB_ONE(asin, u10) AOTB_ONE(asinh, u10)
    AOTB_ONE(atan, u10) AOTB_ONE(atanh, u10) AOTB_ONE(cos, u10)
        AOTB_ONE(cosh, u10) AOTB_ONE(erf, u10) AOTB_ONE(erfc, u15)
            AOTB_ONE(exp, u10) AOTB_ONE(exp2, u10) AOTB_ONE(expm1, u10)
                AOTB_ONE(lgamma, u10) AOTB_ONE(log, u10) AOTB_ONE(log10, u10)
                    AOTB_ONE(log1p, u10) AOTB_ONE(log2, u10) AOTB_ONE(sin, u10)
                        AOTB_ONE(sinh, u10) AOTB_ONE(tan, u10)
                            AOTB_ONE(tanh, u10) AOTB_TWO(atan2, _u10)
                                AOTB_TWO(copysign, ) AOTB_TWO(fmod, )
                                    AOTB_TWO(hypot, _u05) AOTB_TWO(nextafter, )
                                        AOTB_TWO(pow, _u10)
#undef AOTB_ONE
#undef AOTB_TWO
#endif
