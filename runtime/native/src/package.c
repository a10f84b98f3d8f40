#define _GNU_SOURCE
#include "package.h"

#include <errno.h>
#include <fcntl.h>
#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "elf.h"
#include "sha256.h"
#include "signature.h"

#define MANIFEST "extra/aot_backward/manifest.json"
#define SHOWN(text) shown(text, strlen(text))
static const uint64_t LARGEST_MANIFEST = 64 << 20; /* bytes, by docs/format.md; bounds the memory for parsing */

const uint8_t *package_member(const struct aotb_package *p, arena *a, const char *name, size_t *size) {
  const member *found = archive_find(&p->z, name);
  if (!found) arena_fail(a, AOTB_FORMAT, "corrupt: member %s is missing", name);
  uint8_t *out = arena_take(a, (size_t)found->size + 1, 1);
  char digest[65];
  sha256 h;
  archive at = p->z;
  at.a = a;
  archive_bytes(&at, found->offset, out, (size_t)found->size);
  sha256_begin(&h);
  sha256_add(&h, out, (size_t)found->size);
  sha256_end(&h, digest);
  const char *expected = manifest_digest(&p->m, name);
  if (!expected || strcmp(digest, expected))
    arena_fail(a, AOTB_FORMAT, "corrupt: member %s: SHA-256 is %s, expected %s", name, digest, expected ? expected : "none");
  *size = (size_t)found->size;
  return out;
}

/* --- the processor ---------------------------------------------------------------------------------------------------------------------------- */

/* Returns the flags of the first processor from /proc/cpuinfo, with a space before and behind. */
static const char *processor_flags(arena *a) {
#ifdef __aarch64__ /* by the kernel's own list: an emulator's /proc/cpuinfo is the host's */
  static const char *const names[] = {"fp",      "asimd", "evtstrm", "aes",   "pmull",    "sha1",   "sha2", "crc32",
                                      "atomics", "fphp",  "asimdhp", "cpuid", "asimdrdm", "jscvt",  "fcma", "lrcpc",
                                      "dcpop",   "sha3",  "sm3",     "sm4",   "asimddp",  "sha512", "sve"};
  const char *all = " ";
  unsigned long bits = getauxval(AT_HWCAP);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (bits >> i & 1) all = arena_print(a, "%s%s ", all, names[i]);
  return all;
#else
  FILE *file = fopen("/proc/cpuinfo", "re");
  char *line = NULL, *out = NULL;
  size_t room = 0;
  while (file && !out && getline(&line, &room, file) > 0) {
    char *colon = strchr(line, ':'), *end = strchr(line, '\n');
    if (strncmp(line, "flags", 5) || !colon) continue;
    if (end) *end = ' ';
    size_t n = strlen(colon + 1);
    if (n < 1 << 16) out = arena_text(a, colon + 1, n);
  }
  free(line);
  if (file) fclose(file);
  return out ? out : " ";
#endif
}

static bool has_flag(const char *flags, const char *flag) {
  size_t n = strlen(flag);
  for (const char *at = flags; n && (at = strstr(at, flag)); at += n)
    if (at > flags && at[-1] == ' ' && at[n] == ' ') return true;
  return false;
}

/* Finds the highest version of glibc, or of libstdc++, that code for the target requires. */
static void highest(const manifest *m, uint32_t target, bool glibcxx, int out[3]) {
  memset(out, 0, 3 * sizeof *out);
  for (uint32_t i = 0; i < m->library_count; i++) {
    int version[3];
    const build_spec *b = &m->libraries[i].builds[target];
    if (version_read(glibcxx ? b->glibcxx : b->glibc, version) && version_order(version, out) > 0) memcpy(out, version, sizeof version);
  }
}

/* Returns why the code for a target cannot run here, or NULL. */
static const char *problem(struct aotb_package *p, uint32_t number, const char *flags) {
  const target_spec *t = &p->m.targets[number];
  struct utsname system;
  int asked[3], here[3];
  if (strcmp(t->device, "cpu")) return "it was built for a GPU";
  if (uname(&system) || strcmp(system.machine, t->machine))
    return arena_print(&p->a, "it was built for %s, this is %s", shown(t->machine, strlen(t->machine)),
                       shown(system.machine, strlen(system.machine)));
  for (uint32_t i = 0; i < t->cpu_flags.count; i++)
    if (!has_flag(flags, t->cpu_flags.at[i]))
      return arena_print(&p->a, "it needs the CPU flag %s, which this processor lacks", shown(t->cpu_flags.at[i], strlen(t->cpu_flags.at[i])));
  highest(&p->m, number, false, asked);
  if (version_read(gnu_get_libc_version(), here) && version_order(asked, here) > 0)
    return arena_print(&p->a, "it needs glibc %d.%d, this machine has %s", asked[0], asked[1], gnu_get_libc_version());
  return NULL;
}

/* Counts the entries that the backend runs for the target. */
static uint32_t runs(const struct aotb_package *p, uint32_t target) {
  uint32_t out = 0;
  for (uint32_t i = 0; i < p->m.entry_count; i++)
    out += !p->backend->standalone || p->unchecked || !strcmp(standalone_for(&p->m.entries[i], target), "verified");
  return out;
}

/* Chooses among the targets that this processor supports those that run the most entries; among these, the one with the most flags. */
static void choose_target(struct aotb_package *p) {
  const char *flags = processor_flags(&p->a), *why = NULL;
  bool found = false;
  for (uint32_t i = 0; i < p->m.target_count; i++) {
    const char *wrong = problem(p, i, flags);
    if (wrong) {
      if (!why) why = wrong;
      continue;
    }
    uint32_t here = runs(p, i), best = runs(p, p->target);
    if (!found || here > best || (here == best && p->m.targets[i].cpu_flags.count > p->m.targets[p->target].cpu_flags.count)) p->target = i;
    found = true;
  }
  if (!found && p->m.library_count) arena_fail(&p->a, AOTB_INCOMPATIBLE, "it cannot run here: %s", why);
}

/* Checks that torch has the minor version that the code was built with: other versions change layouts of C++ objects and semantics of operators. */
static void check_torch(struct aotb_package *p) {
  int built[3];
  char minor[32];
  size_t n = strcspn(p->m.torch, "+");
  snprintf(minor, sizeof minor, "%.*s", (int)(n < 31 ? n : 31), p->m.torch);
  for (char *c = minor; *c; c++)
    if (*c != '.' && (*c < '0' || *c > '9')) *c = 0; /* 2.13.0a0, 2.13.0rc1 */
  if (!p->m.library_count || !p->backend->torch[0]) return;
  if (!version_read(minor, built) || built[0] != p->backend->torch[0] || built[1] != p->backend->torch[1])
    arena_fail(&p->a, AOTB_INCOMPATIBLE, "it was built with torch %s, and %s is torch %d.%d: aot-backward rebuild it there",
               shown(p->m.torch, strlen(p->m.torch)), p->backend->path, p->backend->torch[0], p->backend->torch[1]);
}

/* --- open and close --------------------------------------------------------------------------------------------------------------------------- */

/* Returns the digest of the whole file. Checks that it still contains the manifest that was read, because the file may have changed meanwhile. */
static const char *digest_of_file(struct aotb_package *p, const member *m, const char *text) {
  enum { CHUNK = 1 << 20 }; /* bytes read at a time: bounds the memory for hashing; the size is a guess */
  uint8_t *chunk = arena_take(&p->a, CHUNK, 1);
  char *out = arena_take(&p->a, 65, 1);
  sha256 h;
  sha256_begin(&h);
  for (uint64_t offset = 0; offset < p->z.size; offset += CHUNK) {
    size_t size = p->z.size - offset < CHUNK ? (size_t)(p->z.size - offset) : CHUNK;
    archive_bytes(&p->z, offset, chunk, size);
    sha256_add(&h, chunk, size);
    uint64_t from = m->offset > offset ? m->offset : offset, to = m->offset + m->size < offset + size ? m->offset + m->size : offset + size;
    if (from < to && memcmp(chunk + (from - offset), text + (from - m->offset), (size_t)(to - from)))
      arena_fail(&p->a, AOTB_FORMAT, "corrupt: it was written to while it was read; open it again");
  }
  sha256_end(&h, out);
  return out;
}

static void read_all(struct aotb_package *p, const char *public_key) {
  archive_read(&p->z, &p->a, p->z.file);
  const member *found = archive_find(&p->z, MANIFEST);
  if (!found) arena_fail(&p->a, AOTB_FORMAT, "corrupt: it has no member %s: is it a package of aot-backward?", MANIFEST);
  if (found->size > LARGEST_MANIFEST)
    arena_fail(&p->a, AOTB_FORMAT, "corrupt: its manifest has %llu bytes; at most %llu are read", (unsigned long long)found->size,
               (unsigned long long)LARGEST_MANIFEST);
  char *text = arena_take(&p->a, (size_t)found->size + 1, 1);
  archive_bytes(&p->z, found->offset, text, (size_t)found->size);
  uint32_t crc = crc32_of(text, (size_t)found->size);
  if (crc != found->crc) arena_fail(&p->a, AOTB_FORMAT, "corrupt: its manifest's CRC is %08x, expected %08x", crc, found->crc);
  if (public_key) signature_check(&p->a, p->path, digest_of_file(p, found, text), public_key);
  sha256 h;
  sha256_begin(&h);
  sha256_add(&h, text, (size_t)found->size);
  sha256_end(&h, p->digest);
  manifest_read(&p->m, &p->z, text, (size_t)found->size);
}

aotb_status aotb_open(const char *path, const aotb_options *options, aotb_package **out) {
  REQUIRE(out, "out", "where to write the package");
  *out = NULL;
  REQUIRE(path, "path", "the path of a package");
  struct aotb_package *p = calloc(1, sizeof *p);
  char *copy = strdup(path);
  if (!p || !copy) {
    free(p);
    free(copy);
    return aotb_fail(AOTB_MEMORY, "package %s: no memory", path);
  }
  p->path = copy;
  p->a.path = copy;
  p->references = 1;
  p->z.file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* opening a named pipe would wait for a writer */
  if (p->z.file < 0) {
    aotb_status status = aotb_fail(AOTB_IO, "package %s: %s", path, strerror(errno));
    free(p->path);
    free(p);
    return status;
  }
  jmp_buf back;
  p->a.back = &back;
  int status = setjmp(back);
  if (status) {
    package_drop(p);
    return (aotb_status)status;
  }
  read_all(p, options ? options->public_key : NULL);
  p->backend = backend_open(&p->a, options ? options->backend : NULL);
  p->unchecked = options && options->unchecked;
  choose_target(p);
  check_torch(p);
  p->a.back = NULL;
  *out = p;
  return AOTB_OK;
}

void package_keep(struct aotb_package *p) { __atomic_add_fetch(&p->references, 1, __ATOMIC_RELAXED); }

void package_drop(struct aotb_package *p) {
  if (__atomic_sub_fetch(&p->references, 1, __ATOMIC_ACQ_REL)) return;
  close(p->z.file);
  arena_free(&p->a);
  free(p->path);
  free(p);
}

void aotb_close(aotb_package *p) {
  if (p) package_drop(p);
}

const entry_spec *package_entry(const struct aotb_package *p, const char *name) {
  char has[512] = "none";
  for (uint32_t i = 0, n = 0; i < p->m.entry_count; i++) {
    const entry_spec *e = &p->m.entries[i];
    if (!strcmp(e->name, name)) return e;
    if (n < sizeof has) n += (uint32_t)snprintf(has + n, sizeof has - n, "%s%s (%s)", i ? ", " : "", SHOWN(e->name), kind_name(e->kind));
  }
  aotb_fail(AOTB_NAME, "package %s has no entry '%s' that can be called from C; it has %s", p->path, SHOWN(name), has);
  return NULL;
}

uint32_t aotb_entries(const aotb_package *p) {
  REQUIRE_OR_NOTHING(p, "package", A_PACKAGE);
  return p->m.entry_count;
}

const char *aotb_entry(const aotb_package *p, uint32_t number) {
  REQUIRE_OR_NOTHING(p, "package", A_PACKAGE);
  return number < p->m.entry_count ? p->m.entries[number].name : NULL;
}

const char *kind_name(entry_kind kind) {
  static const char *const names[] = {[ENTRY_MODULE] = "module", [ENTRY_FUNCTION] = "function", [ENTRY_GRAD] = "grad", [ENTRY_STEP] = "step"};
  return names[kind];
}

const char *aotb_entry_kind(const aotb_package *p, uint32_t number) {
  REQUIRE_OR_NOTHING(p, "package", A_PACKAGE);
  return number < p->m.entry_count ? kind_name(p->m.entries[number].kind) : NULL;
}

const char *aotb_digest(const aotb_package *p) {
  REQUIRE_OR_NOTHING(p, "package", A_PACKAGE);
  return p->digest;
}

const char *aotb_metadata(const aotb_package *p, const char *name) {
  REQUIRE_OR_NOTHING(p, "package", A_PACKAGE);
  if (!name) return p->m.metadata;
  const entry_spec *entry = package_entry(p, name);
  return entry ? entry->metadata : NULL;
}

aotb_status aotb_seed(aotb_package *p, uint64_t seed) {
  REQUIRE(p, "package", A_PACKAGE);
  arena own = {.path = p->path};
  jmp_buf back;
  own.back = &back;
  int status = setjmp(back);
  if (!status) backend_seed(&own, p->backend, seed);
  arena_free(&own);
  return (aotb_status)status;
}

aotb_status aotb_threads(aotb_package *p, int count) {
  REQUIRE(p, "package", A_PACKAGE);
  if (count < 1) return aotb_fail(AOTB_INPUT, "%d threads; expected at least 1", count);
  backend_threads(p->backend, count);
  return AOTB_OK;
}
