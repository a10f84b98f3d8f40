#define _GNU_SOURCE
#include "signature.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "json.h"
#include "sha256.h"

enum { LARGEST = 1 << 20 }; /* bytes of a signature or a key; typical are 2,000 and 200 */
static const char TYPE[] = "application/vnd.in-toto+json";

#define WRONG(a, ...) arena_fail(a, AOTB_SIGNATURE, __VA_ARGS__)

typedef struct {
  uint8_t *at;
  size_t size;
} bytes;

static bytes read_file(arena *a, const char *path, const char *what, bool plain) {
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status;
  if (fd < 0) WRONG(a, "%s %s cannot be read: %s", what, path, strerror(errno));
  bytes out = {malloc(LARGEST + 1), 0};
  ssize_t n = -1;
  bool right = out.at && !fstat(fd, &status) && (!plain || S_ISREG(status.st_mode));
  while (right && out.size <= LARGEST && (n = read(fd, out.at + out.size, LARGEST + 1 - out.size)) > 0) out.size += (size_t)n;
  close(fd);
  uint8_t *kept =
      right && !n && out.size <= LARGEST ? arena_take(a, out.size + 1, 1) : NULL; /* a copy in the arena; it fails only if memory is short */
  if (kept) memcpy(kept, out.at, out.size);
  free(out.at);
  if (!kept) WRONG(a, "%s %s is not a plain file of at most %d bytes", what, path, LARGEST);
  return (bytes){kept, out.size};
}

static int digit(char c) {
  static const char all[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const char *found = c ? strchr(all, c) : NULL;
  return found ? (int)(found - all) : -1;
}

/* Decodes padded base64 and skips line ends. Returns false if the text is invalid. */
static bool decode(arena *a, const char *text, size_t length, bytes *out) {
  uint32_t held = 0;
  int bits = 0;
  size_t padding = 0, digits = 0;
  out->at = arena_take(a, length + 1, 1);
  out->size = 0;
  for (size_t i = 0; i < length; i++) {
    if (text[i] == '\n' || text[i] == '\r') continue;
    if (text[i] == '=') {
      padding++;
      continue;
    }
    int value = digit(text[i]);
    if (value < 0 || padding) return false;
    digits++;
    held = held << 6 | (uint32_t)value;
    bits += 6;
    if (bits >= 8) out->at[out->size++] = (uint8_t)(held >> (bits -= 8));
  }
  return (digits + padding) % 4 == 0 && padding < 3;
}

static char *encode(arena *a, const uint8_t *data, size_t size) { /* in lines of 64 characters, as in PEM */
  static const char all[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  char *out = arena_take(a, size * 2 + 8, 1), *w = out;
  for (size_t i = 0; i < size; i += 3) {
    uint32_t v = (uint32_t)data[i] << 16 | (i + 1 < size ? (uint32_t)data[i + 1] << 8 : 0) | (i + 2 < size ? data[i + 2] : 0);
    *w++ = all[v >> 18];
    *w++ = all[v >> 12 & 63];
    *w++ = i + 1 < size ? all[v >> 6 & 63] : '=';
    *w++ = i + 2 < size ? all[v & 63] : '=';
    if (i % 48 == 45 || i + 3 >= size) *w++ = '\n';
  }
  return out;
}

/* --- libcrypto -------------------------------------------------------------------------------------------------------------------------------- */

typedef struct {
  void *(*read_key)(void **, const unsigned char **, long);
  void (*free_key)(void *), *(*new_context)(void), (*free_context)(void *);
  int (*begin)(void *context, void **, const void *digest, void *engine, void *key);
  int (*verify)(void *context, const unsigned char *signature, size_t, const unsigned char *data, size_t);
  const void *(*sha[3])(void);
} crypto;

static crypto open_crypto(arena *a) {
  static const char *const files[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
  static const char *const names[] = {"d2i_PUBKEY",       "EVP_PKEY_free", "EVP_MD_CTX_new", "EVP_MD_CTX_free", "EVP_DigestVerifyInit",
                                      "EVP_DigestVerify", "EVP_sha256",    "EVP_sha384",     "EVP_sha512"};
  crypto c;
  void *const to[] = {&c.read_key, &c.free_key, &c.new_context, &c.free_context, &c.begin, &c.verify, &c.sha[0], &c.sha[1], &c.sha[2]};
  void *library = NULL;
  for (int i = 0; i < 2 && !library; i++) library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
  if (!library) WRONG(a, "signatures need OpenSSL's libcrypto.so.3 (or 1.1), which is not installed");
  for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
    void *found = dlsym(library, names[i]); /* the library stays open */
    if (!found) WRONG(a, "libcrypto lacks %s", names[i]);
    memcpy(to[i], &found, sizeof found);
  }
  return c;
}

/* The bytes before the point in the DER form of keys on P-256, P-384, P-521 (RFC 5480). */
static const struct {
  uint8_t size, bytes[32];
} curves[] = {
    {26, {0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x02, 0x01,
          0x06, 0x08, 0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00}},
    {23, {0x30, 0x76, 0x30, 0x10, 0x06, 0x07, 0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x02, 0x01, 0x06, 0x05, 0x2B, 0x81, 0x04, 0x00, 0x22, 0x03, 0x62, 0x00}},
    {25, {0x30, 0x81, 0x9B, 0x30, 0x10, 0x06, 0x07, 0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x02,
          0x01, 0x06, 0x05, 0x2B, 0x81, 0x04, 0x00, 0x23, 0x03, 0x81, 0x86, 0x00}},
};

typedef struct {
  bytes der;
  int curve;
  char fingerprint[65];
} public_key;

static public_key read_key(arena *a, const char *path) {
  static const char begin[] = "-----BEGIN PUBLIC KEY-----", end[] = "-----END PUBLIC KEY-----";
  bytes file = read_file(a, path, "the key", false);
  const char *text = (const char *)file.at, *first = strstr(text, begin), *last = first ? strstr(first, end) : NULL;
  public_key out = {.curve = -1};
  if (strstr(text, "PRIVATE KEY"))
    WRONG(a, "cannot check signatures with %s: it is a private key; write its public key with: openssl pkey -in private.pem -pubout -out public.pem",
          path);
  bool one = last && !strstr(last, "-----BEGIN ");
  if (one) one = decode(a, first + sizeof begin - 1, (size_t)(last - first) - sizeof begin + 1, &out.der);
  for (int i = 0; one && i < 3; i++)
    if (out.der.size > curves[i].size && !memcmp(out.der.at, curves[i].bytes, curves[i].size) && out.der.at[curves[i].size] == 4) out.curve = i;
  if (out.curve < 0) WRONG(a, "cannot check signatures with %s: expected one public key in PEM form on P-256, P-384 or P-521", path);
  const char *pem = arena_print(a, "%s\n%s%s\n", begin, encode(a, out.der.at, out.der.size), end);
  sha256 h;
  sha256_begin(&h);
  sha256_add(&h, pem, strlen(pem));
  sha256_end(&h, out.fingerprint);
  return out;
}

static bool verified(arena *a, const public_key *key, const bytes *signature, const char *said, size_t length) {
  crypto c = open_crypto(a);
  const unsigned char *at = key->der.at;
  void *opened = c.read_key(NULL, &at, (long)key->der.size), *context = c.new_context();
  bool good = opened && context && c.begin(context, NULL, c.sha[key->curve](), NULL, opened) == 1 &&
              c.verify(context, signature->at, signature->size, (const unsigned char *)said, length) == 1;
  if (context) c.free_context(context);
  if (opened) c.free_key(opened);
  return good;
}

/* --- the bundle ------------------------------------------------------------------------------------------------------------------------------- */

static const json *at(const json *value, const char *key) { return value && value->kind == JSON_OBJECT ? json_get(value, key) : NULL; }
static const json *item(const json *value, uint32_t number) {
  return value && value->kind == JSON_ARRAY && number < value->count ? &value->items[number] : NULL;
}
static const char *words_of(const json *value) { return value && value->kind == JSON_STRING ? value->text : ""; }

/* Returns the digest in the statement, which must name one resource, ".". */
static const char *resource_of(arena *a, const char *file, const bytes *payload) {
  json statement =
      json_read_as(a, AOTB_SIGNATURE, arena_print(a, "the statement of the signature %s", file), (const char *)payload->at, payload->size);
  const json *predicate = at(&statement, "predicate"), *resources = at(predicate, "resources"), *only = item(resources, 0),
             *subject = item(at(&statement, "subject"), 0);
  bool right = !strcmp(words_of(at(&statement, "_type")), "https://in-toto.io/Statement/v1") &&
               !strcmp(words_of(at(&statement, "predicateType")), "https://model_signing/signature/v1.0") && only && !item(resources, 1) &&
               !strcmp(words_of(at(only, "name")), ".") && !strcmp(words_of(at(only, "algorithm")), "sha256") && subject;
  const char *digest = words_of(at(only, "digest"));
  right = right && strlen(digest) == 64 && strspn(digest, "0123456789abcdef") == 64;
  if (!right) WRONG(a, "the signature %s is good, but not for one package with its SHA-256; sign the package: aot-backward sign", file);
  uint8_t raw[32];
  char root[65];
  sha256 h;
  for (int i = 0; i < 32; i++) raw[i] = (uint8_t)strtoul((char[]){digest[2 * i], digest[2 * i + 1], 0}, NULL, 16);
  sha256_begin(&h);
  sha256_add(&h, raw, sizeof raw);
  sha256_end(&h, root);
  if (strcmp(root, words_of(at(at(subject, "digest"), "sha256")))) WRONG(a, "the signature %s contradicts itself: sign the package again", file);
  return digest;
}

void signature_check(arena *a, const char *path, const char *digest, const char *key_path) {
  public_key key = read_key(a, key_path);
  const char *file = arena_print(a, "%s.sig", path);
  if (access(file, F_OK)) {
    char *real = realpath(path, NULL);
    if (real) file = arena_print(a, "%s.sig", real);
    free(real);
  }
  if (access(file, F_OK) && errno == ENOENT)
    WRONG(a, "it is not signed, and a signature by %s is required: expected one in %s; aot-backward sign makes it", key_path, file);
  bytes text = read_file(a, file, "its signature", true), payload, signature;
  json bundle = json_read_as(a, AOTB_SIGNATURE, arena_print(a, "its signature %s", file), (const char *)text.at, text.size);
  const json *envelope = at(&bundle, "dsseEnvelope"), *signatures = at(envelope, "signatures");
  const char *hint = words_of(at(at(at(&bundle, "verificationMaterial"), "publicKey"), "hint")), *body = words_of(at(envelope, "payload")),
             *signed_by = words_of(at(item(signatures, 0), "sig"));
  if (strcmp(words_of(at(&bundle, "mediaType")), "application/vnd.dev.sigstore.bundle.v0.3+json"))
    WRONG(a, "its signature %s is not a Sigstore bundle of version 0.3; sign the package again: aot-backward sign", file);
  if (strcmp(hint, key.fingerprint))
    WRONG(a, "its signature %s is by another key: its fingerprint is %s, expected %s; load with the public key of the signer", file,
          shown(hint, strlen(hint)), key.fingerprint);
  if (strcmp(words_of(at(envelope, "payloadType")), TYPE) || item(signatures, 1) || !decode(a, body, strlen(body), &payload) ||
      !decode(a, signed_by, strlen(signed_by), &signature))
    WRONG(a, "its signature %s cannot be parsed: it is damaged; sign the package again", file);
  const char *head = arena_print(a, "DSSEv1 %zu %s %zu ", sizeof TYPE - 1, TYPE, payload.size); /* DSSE's pre-authentication encoding */
  size_t length = strlen(head) + payload.size;
  char *said = arena_take(a, length + 1, 1);
  memcpy(said, head, strlen(head));
  memcpy(said + strlen(head), payload.at, payload.size);
  if (!verified(a, &key, &signature, said, length))
    WRONG(a, "its signature %s is bad: it was changed after it was made, or is not by the key that it names; sign the package again", file);
  const char *signed_digest = resource_of(a, file, &payload);
  if (strcmp(signed_digest, digest))
    WRONG(a,
          "its signature %s is good, but for other bytes: for SHA-256 %s, and this file has %s; the file was changed or replaced after it was signed",
          file, signed_digest, digest);
}
