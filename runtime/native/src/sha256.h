/* SHA-256 (FIPS 180-4), and the CRC-32 of zip files. */
#ifndef AOTB_SHA256_H
#define AOTB_SHA256_H
#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint32_t state[8];
  uint64_t length;
  uint8_t block[64];
} sha256;

void sha256_begin(sha256 *h);
void sha256_add(sha256 *h, const void *data, size_t size);
void sha256_end(sha256 *h, char hexadecimal[65]);

uint32_t crc32_of(const void *data, size_t size);
#endif
