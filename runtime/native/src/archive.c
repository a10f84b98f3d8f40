/* Layouts: PKWARE APPNOTE 6.3, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16, 4.5.3. Every size and offset in a header is compared with the size of the
 * file before it is used to allocate or read. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "archive.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Bytes of the records without their variable parts; ids of extra fields, PADDING is PyTorch's; an attribute bit. */
enum { LOCAL = 30, CENTRAL = 46, END = 22, LOCATOR = 20, END64 = 56, ZIP64 = 1, PADDING = 0x4246, DOS_FOLDER = 0x10 };
static const uint32_t WIDE = 0xFFFFFFFF;  /* the true value is in the zip64 extra field */
static const uint64_t LARGEST = 64 << 20; /* bytes of a directory; a member takes about 150 */

static uint64_t number(const uint8_t *p, int bytes) {
  uint64_t v = 0;
  while (bytes--) v = v << 8 | p[bytes];
  return v;
}
static uint32_t two(const uint8_t *p) { return (uint32_t)number(p, 2); }
static uint32_t four(const uint8_t *p) { return (uint32_t)number(p, 4); }

#define WRONG(z, ...) arena_fail((z)->a, AOTB_FORMAT, "corrupt: " __VA_ARGS__)

void archive_bytes(const archive *z, uint64_t offset, void *out, size_t size) {
  uint8_t *to = out;
  while (size) {
    ssize_t n = pread(z->file, to, size < 1 << 30 ? size : 1 << 30, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) arena_fail(z->a, AOTB_IO, "cannot be read at byte %llu: %s", (unsigned long long)offset, strerror(errno));
    if (!n)
      WRONG(z, "it ended at byte %llu while it was read; was it overwritten in place? Write a new file, and rename it over the old one",
            (unsigned long long)offset);
    to += n;
    offset += (uint64_t)n;
    size -= (size_t)n;
  }
}

/* Reads the number of members, and offset and length of the central directory, which must end at the end records. */
static void end_record(const archive *z, uint64_t *count, uint64_t *start, uint64_t *length) {
  uint8_t e[END], l[LOCATOR], w[END64];
  if (z->size < END) WRONG(z, "not a zip archive (%llu bytes)", (unsigned long long)z->size);
  uint64_t end = z->size - END;
  archive_bytes(z, end, e, END);
  if (four(e) != 0x06054B50) WRONG(z, "not a zip archive, or cut short: no end record in the last %d bytes", END);
  if (two(e + 20)) WRONG(z, "its end record states a comment of %u bytes", two(e + 20));
  if (two(e + 4) || two(e + 6) || two(e + 8) != two(e + 10)) WRONG(z, "it is one part of a split archive");
  *count = two(e + 10);
  *length = four(e + 12);
  *start = four(e + 16);
  if (*start + *length == end) return;
  if (end < LOCATOR + END64) WRONG(z, "bytes before its end record belong to no member");
  end -= LOCATOR + END64;
  archive_bytes(z, end + END64, l, LOCATOR);
  if (four(l) != 0x07064B50)
    WRONG(z, "bytes %llu to %llu, before its end record, belong to no member", (unsigned long long)(*start + *length),
          (unsigned long long)(z->size - END));
  archive_bytes(z, end, w, END64);
  bool sound = four(w) == 0x06064B50 && number(w + 4, 8) == END64 - 12 && number(l + 8, 8) == end && number(w + 24, 8) == number(w + 32, 8);
  if (!sound || four(w + 16) || four(w + 20) || four(l + 4) || four(l + 16) != 1) WRONG(z, "its zip64 end record is invalid");
  uint64_t count64 = number(w + 32, 8), length64 = number(w + 40, 8), start64 = number(w + 48, 8), sum;
  bool agree = *count == (count64 < 0xFFFF ? count64 : 0xFFFF) && *length == (length64 < WIDE ? length64 : WIDE) &&
               *start == (start64 < WIDE ? start64 : WIDE);
  if (!agree || __builtin_add_overflow(start64, length64, &sum) || sum != end) WRONG(z, "its two end records disagree");
  *count = count64;
  *length = length64;
  *start = start64;
}

/* Returns the zip64 field of the extra fields, or NULL. Only `second` is allowed as another field. */
static const uint8_t *zip64_field(const archive *z, const char *name, const uint8_t *data, size_t size, uint32_t second, size_t *length) {
  const uint8_t *found = NULL;
  bool seen = false;
  *length = 0;
  while (size) {
    uint32_t kind = size >= 4 ? two(data) : 0xFFFF, n = size >= 4 ? two(data + 2) : 0;
    bool twice = (kind == ZIP64 && found) || (kind == second && second != ZIP64 && seen);
    if ((kind != ZIP64 && kind != second) || twice || 4 + n > size)
      WRONG(z, "member %s: extra field %#x of %u bytes is not allowed in packages", name, kind, n);
    if (kind == ZIP64) {
      found = data + 4;
      *length = n;
    } else seen = true;
    data += 4 + n;
    size -= 4 + n;
  }
  return found;
}

/* Replaces values that do not fit 32 bits by their 64-bit values. */
static void widen(const archive *z, const char *name, uint64_t *const *values, int count, const uint8_t *field, size_t length) {
  size_t missing = 0;
  for (int i = 0; i < count; i++) missing += *values[i] == WIDE;
  if (length != 8 * missing) WRONG(z, "member %s: %zu sizes of 64 bits in a zip64 field of %zu bytes", name, missing, length);
  for (int i = 0; i < count; i++)
    if (*values[i] == WIDE) {
      *values[i] = number(field, 8);
      field += 8;
    }
}

static void check_name(const archive *z, const char *name, size_t length) {
  bool right = length > 0;
  for (size_t i = 0; i < length; i++) right = right && name[i] > ' ' && name[i] <= '~' && name[i] != '\\' && name[i] != ':';
  if (!right) WRONG(z, "member '%s': a name holds printable ASCII only, without '\\' and ':'", shown(name, length));
  for (const char *part = name, *end = name + length; part <= end;) {
    const char *slash = memchr(part, '/', (size_t)(end - part));
    size_t n = (size_t)((slash ? slash : end) - part);
    if (!n || (n == 1 && *part == '.') || (n == 2 && !memcmp(part, "..", 2)))
      WRONG(z, "member '%s': an absolute name, or an empty, '.' or '..' component", shown(name, length));
    if (!slash) break;
    part = slash + 1;
  }
}

static int lower(char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

static int by_folded_name(const void *x, const void *y) {
  const char *a = ((const member *)x)->name, *b = ((const member *)y)->name;
  while (*a && lower(*a) == lower(*b)) a++, b++;
  return lower(*a) - lower(*b);
}

static int by_name(const void *x, const void *y) { return strcmp(((const member *)x)->name, ((const member *)y)->name); }

/* Reads one entry of the central directory and its local header. Returns the bytes of the entry. */
static size_t entry(const archive *z, const uint8_t *c, size_t left, uint64_t limit, uint64_t expected, member *out) {
  if (left < CENTRAL || four(c) != 0x02014B50) WRONG(z, "an entry of the central directory is invalid");
  size_t n = two(c + 28), extra = two(c + 30), comment = two(c + 32), length;
  if (CENTRAL + n + extra + comment > left) WRONG(z, "an entry of the central directory is invalid");
  check_name(z, (const char *)c + CENTRAL, n);
  const char *name = arena_text(z->a, (const char *)c + CENTRAL, n);
  uint64_t size = four(c + 24), stored = four(c + 20), header = four(c + 42);
  const uint8_t *field = zip64_field(z, name, c + CENTRAL + n, extra, ZIP64, &length);
  widen(z, name, (uint64_t *const[]){&size, &stored, &header}, 3, field, length);
  if (two(c + 8))
    WRONG(z, "member %s: flags %#x; encryption, data descriptors and other encodings are refused. A file of torch.save has them: export the model",
          name, two(c + 8));
  if (two(c + 10) || size != stored) WRONG(z, "member %s: compressed (method %u); members must be stored uncompressed", name, two(c + 10));
  uint32_t mode = four(c + 38), kind = mode >> 16 & 0170000;
  if ((c[5] == 3 && kind && kind != 0100000) || mode & DOS_FOLDER) WRONG(z, "member %s: mode %#o is not that of a plain file", name, mode >> 16);
  if (two(c + 34) || comment) WRONG(z, "member %s: it has a comment, or is in another part of a split archive", name);
  if (header != expected)
    WRONG(z, "member %s begins at byte %llu, expected %llu, right after the one before", name, (unsigned long long)header,
          (unsigned long long)expected);
  if (limit < LOCAL || header > limit - LOCAL)
    WRONG(z, "member %s: its header lies at byte %llu, but members end at %llu", name, (unsigned long long)header, (unsigned long long)limit);
  uint8_t l[LOCAL];
  archive_bytes(z, header, l, LOCAL);
  size_t local_n = two(l + 26), local_extra = two(l + 28);
  uint64_t offset = header + LOCAL + local_n + local_extra;
  if (offset > limit || size > limit - offset)
    WRONG(z, "member %s: %llu bytes at %llu, but members end at byte %llu", name, (unsigned long long)size, (unsigned long long)offset,
          (unsigned long long)limit);
  uint8_t rest[2 * 65535];
  archive_bytes(z, header + LOCAL, rest, local_n + local_extra);
  if (four(l) != 0x04034B50 || local_n != n || memcmp(rest, name, n))
    WRONG(z, "member %s: no header of that name at byte %llu", name, (unsigned long long)header);
  uint64_t local_size = four(l + 22), local_stored = four(l + 18);
  field = zip64_field(z, name, rest + local_n, local_extra, PADDING, &length);
  widen(z, name, (uint64_t *const[]){&local_size, &local_stored}, 2, field, length);
  if (memcmp(l + 6, c + 8, 12) || local_size != size || local_stored != stored)
    WRONG(z, "member %s: its local header and the central directory disagree", name);
  *out = (member){name, offset, size, four(c + 16)};
  return CENTRAL + n + extra;
}

void archive_read(archive *z, arena *a, int file) {
  struct stat status;
  *z = (archive){.a = a, .file = file};
  if (fstat(file, &status)) arena_fail(a, AOTB_IO, "cannot be read: %s", strerror(errno));
  if (!S_ISREG(status.st_mode)) arena_fail(a, AOTB_IO, "is %s", S_ISDIR(status.st_mode) ? "a folder" : "not a plain file");
  z->size = (uint64_t)status.st_size;
  uint64_t count, start, length, at = 0, expected = 0;
  end_record(z, &count, &start, &length);
  if (length > LARGEST || count > length / CENTRAL)
    WRONG(z, "%llu members in a central directory of %llu bytes", (unsigned long long)count, (unsigned long long)length);
  uint8_t *central = arena_take(a, (size_t)length, 1);
  archive_bytes(z, start, central, (size_t)length);
  z->members = TAKE(a, (size_t)count + 1, member);
  for (; z->count < count; z->count++) {
    member *m = &z->members[z->count];
    at += entry(z, central + at, (size_t)(length - at), start, expected, m);
    expected = m->offset + m->size;
  }
  if (at != length) WRONG(z, "%llu bytes in the central directory after its last member", (unsigned long long)(length - at));
  if (expected != start) WRONG(z, "%llu bytes between the last member and the central directory", (unsigned long long)(start - expected));
  qsort(z->members, z->count, sizeof *z->members, by_folded_name);
  for (uint32_t i = 1; i < z->count; i++)
    if (!by_folded_name(&z->members[i - 1], &z->members[i]))
      WRONG(z, "member %s: the archive also holds %s", z->members[i].name, z->members[i - 1].name);
  const char *top = NULL;
  size_t n = 0;
  for (uint32_t i = 0; i < z->count; i++) {
    const char *slash = strchr(z->members[i].name, '/');
    size_t here = slash ? (size_t)(slash - z->members[i].name) : strlen(z->members[i].name);
    if (!slash || (top && (here != n || memcmp(top, z->members[i].name, n))))
      WRONG(z, "members: expected one top folder, got several, or a member without one");
    top = z->members[i].name;
    n = here;
  }
  for (uint32_t i = 0; i < z->count; i++) z->members[i].name += n + 1;
  qsort(z->members, z->count, sizeof *z->members, by_name);
}

const member *archive_find(const archive *z, const char *name) {
  member key = {.name = name};
  return z->count ? bsearch(&key, z->members, z->count, sizeof key, by_name) : NULL;
}
