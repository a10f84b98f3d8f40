/* Detached signatures: docs/signatures.md. A Sigstore bundle (JSON) beside the package, by an elliptic-curve key, around an in-toto statement that names
 * one resource with the SHA-256 of the package's bytes. */
#ifndef AOTB_SIGNATURE_H
#define AOTB_SIGNATURE_H
#include "words.h"

/* Fails unless `path`.sig is by the key in the PEM file `key`, and of bytes with that digest. libcrypto (OpenSSL) is opened for it. */
void signature_check(arena *a, const char *path, const char *digest, const char *key);
#endif
