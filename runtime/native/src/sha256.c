#include "sha256.h"

#ifdef __x86_64__
#include <immintrin.h>
#include <cpuid.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif
#include <stdbool.h>
#include <string.h>

static const uint32_t K[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
                               0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
                               0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
                               0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
                               0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
                               0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
                               0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turned(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void blocks_plain(uint32_t state[8], const uint8_t *data, size_t count) {
  for (; count--; data += 64) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
      w[i] = (uint32_t)data[4 * i] << 24 | (uint32_t)data[4 * i + 1] << 16 | (uint32_t)data[4 * i + 2] << 8 | data[4 * i + 3];
    for (int i = 16; i < 64; i++) {
      uint32_t a = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3, b = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
      uint32_t one = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
      uint32_t two = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      memmove(s + 1, s, 7 * sizeof *s);
      s[4] += one;
      s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
  }
}

/* blocks_sha uses the processor's SHA instructions, which are five times as fast (x86-64). */
#ifdef __x86_64__
/* The state is held as ABEF and CDGH. */
__attribute__((target("sha,sse4.1,ssse3"))) static void blocks_sha(uint32_t state[8], const uint8_t *data, size_t count) {
  const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i t = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1),
          u = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
  __m128i abef = _mm_alignr_epi8(t, u, 8), cdgh = _mm_blend_epi16(u, t, 0xF0);
  for (; count--; data += 64) {
    __m128i w[4], abef_before = abef, cdgh_before = cdgh;
    for (int i = 0; i < 4; i++) w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), order);
    for (int i = 0; i < 16; i++) {
      __m128i now = w[i & 3], sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      if (i < 12) { /* the four words of round i + 4 */
        __m128i next = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
        w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  t = _mm_shuffle_epi32(abef, 0x1B);
  u = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(t, u, 0xF0));
  _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(u, t, 8));
}

static bool processor_has_sha(void) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1 && __builtin_cpu_supports("sse4.1");
}
#elif defined(__aarch64__)
__attribute__((target("+crypto"))) static void blocks_sha(uint32_t state[8], const uint8_t *data, size_t count) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count--; data += 64) {
    uint32x4_t w[4], abcd_before = abcd, efgh_before = efgh;
    for (int i = 0; i < 4; i++) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    for (int i = 0; i < 16; i++) {
      uint32x4_t sum = vaddq_u32(w[i & 3], vld1q_u32(K + 4 * i)), abcd_now = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_now, sum);
      if (i < 12) /* the four words of round i + 4 */
        w[i & 3] = vsha256su1q_u32(vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]), w[(i + 2) & 3], w[(i + 3) & 3]);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

static bool processor_has_sha(void) { return getauxval(AT_HWCAP) & HWCAP_SHA2; }
#else
#define blocks_sha blocks_plain
static bool processor_has_sha(void) { return false; }
#endif

static bool has_sha(void) {
  static int known; /* 1: no, 2: yes */
  int is = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (!is) {
    is = processor_has_sha() ? 2 : 1;
    __atomic_store_n(&known, is, __ATOMIC_RELAXED);
  }
  return is == 2;
}

static void blocks(uint32_t state[8], const uint8_t *data, size_t count) { (has_sha() ? blocks_sha : blocks_plain)(state, data, count); }

void sha256_begin(sha256 *h) {
  static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(h->state, first, sizeof first);
  h->length = 0;
}

void sha256_add(sha256 *h, const void *data, size_t size) {
  const uint8_t *bytes = data;
  size_t waiting = h->length % 64;
  h->length += size;
  if (waiting) {
    size_t taken = size < 64 - waiting ? size : 64 - waiting;
    if (taken) memcpy(h->block + waiting, bytes, taken);
    bytes += taken;
    size -= taken;
    if (waiting + taken < 64) return;
    blocks(h->state, h->block, 1);
  }
  blocks(h->state, bytes, size / 64);
  if (size % 64) memcpy(h->block, bytes + size / 64 * 64, size % 64);
}

void sha256_end(sha256 *h, char hexadecimal[65]) {
  uint64_t bits = h->length * 8;
  uint8_t end[72] = {0x80};
  size_t padding = (h->length % 64 < 56 ? 56 : 120) - h->length % 64;
  for (int i = 0; i < 8; i++) end[padding + (size_t)i] = (uint8_t)(bits >> (56 - 8 * i));
  sha256_add(h, end, padding + 8);
  for (int i = 0; i < 64; i++) hexadecimal[i] = "0123456789abcdef"[h->state[i / 8] >> (28 - i % 8 * 4) & 15];
  hexadecimal[64] = 0;
}

uint32_t crc32_of(const void *data, size_t size) {
  static const uint32_t quarter[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                       0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
  const uint8_t *bytes = data;
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; i++) {
    crc = crc >> 4 ^ quarter[(crc ^ bytes[i]) & 15];
    crc = crc >> 4 ^ quarter[(crc ^ bytes[i] >> 4) & 15];
  }
  return ~crc;
}
