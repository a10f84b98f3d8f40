/* Detached signatures: docs/signatures.md. A Sigstore bundle (JSON) lies next to the package. It is signed by an elliptic-curve key and contains an
 * in-toto statement, which names one resource with the SHA-256 of the package's bytes. */
#ifndef AOTB_SIGNATURE_H
#define AOTB_SIGNATURE_H
#include "words.h"

/* Fails unless `path`.sig is a signature by the key in the PEM file `key` of bytes with that digest. Opens libcrypto (OpenSSL). */
void signature_check(arena *a, const char *path, const char *digest, const char *key);
#endif
