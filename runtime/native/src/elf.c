/* Layouts: System V ABI (ELF-64); symbol versions: Linux Standard Base, "Symbol Versioning". */
#include "elf.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

#ifdef __aarch64__
enum { MACHINE = EM_AARCH64 };
#else
enum { MACHINE = EM_X86_64 };
#endif
enum { MOST = 1 << 16 }; /* tags or versions of a kind; the largest of libtorch_cpu.so is about 100 */

typedef struct {
  arena *a;
  const char *name;
  const uint8_t *bytes;
  size_t size;
  const Elf64_Phdr *segments;
  uint32_t count;
} file;

#define WRONG(f, ...) arena_fail((f)->a, AOTB_FORMAT, "corrupt: " __VA_ARGS__)

static const uint8_t *part(const file *f, uint64_t offset, uint64_t size, const char *what) {
  if (offset > f->size || size > f->size - offset) WRONG(f, "%s: cut short in its %s", f->name, what);
  return f->bytes + offset;
}

static const uint8_t *at_address(const file *f, uint64_t address, uint64_t size, const char *what) {
  for (uint32_t i = 0; i < f->count; i++) {
    const Elf64_Phdr *s = &f->segments[i];
    if (s->p_type == PT_LOAD && s->p_vaddr <= address && size <= s->p_filesz && address - s->p_vaddr <= s->p_filesz - size)
      return part(f, s->p_offset + (address - s->p_vaddr), size, what);
  }
  WRONG(f, "%s: the %s lies outside of every segment", f->name, what);
}

static const char *string(const file *f, const char *strings, uint64_t size, uint64_t offset) {
  if (offset >= size || !memchr(strings + offset, 0, size - offset)) WRONG(f, "%s: a name outside of its string table", f->name);
  return strings + offset;
}

bool version_read(const char *text, int out[3]) {
  memset(out, 0, 3 * sizeof *out);
  for (int i = 0; i < 3; i++) {
    if (*text < '0' || *text > '9') return false;
    for (; *text >= '0' && *text <= '9'; text++)
      if ((out[i] = out[i] * 10 + *text - '0') > 99999) return false;
    if (!*text) return true;
    if (*text++ != '.') return false;
  }
  return false;
}

int version_order(const int *one, const int *other) {
  for (int i = 0; i < 3; i++)
    if (one[i] != other[i]) return one[i] - other[i];
  return 0;
}

static void higher(int highest[3], const int version[3]) {
  if (version_order(version, highest) > 0) memcpy(highest, version, 3 * sizeof *highest);
}

/* Records a required version. GLIBC_ABI_DT_RELR (packed relative relocations) came with glibc 2.36. */
static void asks_for(elf *out, const char *name) {
  int version[3];
  if (!strcmp(name, "GLIBC_ABI_DT_RELR")) higher(out->glibc, (int[3]){2, 36, 0});
  else if (!strncmp(name, "GLIBC_", 6) && version_read(name + 6, version)) higher(out->glibc, version);
  else if (!strncmp(name, "GLIBCXX_", 8) && version_read(name + 8, version)) higher(out->glibcxx, version);
}

static void versions(const file *f, elf *out, uint64_t address, uint64_t records, const char *strings, uint64_t strings_size) {
  int left = MOST;
  for (; records; records--) {
    Elf64_Verneed need;
    memcpy(&need, at_address(f, address, sizeof need, "symbol versions"), sizeof need);
    uint64_t inner = address + need.vn_aux;
    for (uint32_t i = 0; i < need.vn_cnt; i++) {
      Elf64_Vernaux item;
      if (!left--) WRONG(f, "%s: more than %d symbol versions", f->name, MOST);
      memcpy(&item, at_address(f, inner, sizeof item, "symbol versions"), sizeof item);
      asks_for(out, string(f, strings, strings_size, item.vna_name));
      if (!item.vna_next) break;
      inner += item.vna_next;
    }
    if (!need.vn_next || !left--) break;
    address += need.vn_next;
  }
}

static void check_sections(const file *f, const Elf64_Ehdr *header) {
  if (!header->e_shnum) return; /* stripped */
  if (header->e_shentsize != sizeof(Elf64_Shdr)) WRONG(f, "%s: section headers of %u bytes", f->name, header->e_shentsize);
  const uint8_t *table = part(f, header->e_shoff, (uint64_t)header->e_shnum * sizeof(Elf64_Shdr), "section headers");
  for (uint32_t i = 0; i < header->e_shnum; i++) {
    Elf64_Shdr section;
    memcpy(&section, table + i * sizeof section, sizeof section);
    if (section.sh_type != SHT_NOBITS) part(f, section.sh_offset, section.sh_size, "sections");
  }
}

elf elf_read(arena *a, const char *name, const uint8_t *bytes, size_t size) {
  file f = {.a = a, .name = name, .bytes = bytes, .size = size};
  elf out = {.executable_stack = true}; /* the linker's default without a header */
  Elf64_Ehdr header;
  memcpy(&header, part(&f, 0, sizeof header, "ELF header"), sizeof header);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG)) WRONG(&f, "%s: not an ELF file", name);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB)
    WRONG(&f, "%s: not a little-endian ELF file of 64 bits", name);
  if (header.e_machine != MACHINE) WRONG(&f, "%s: built for ELF machine %u, expected %u", name, header.e_machine, MACHINE);
  if (header.e_type != ET_DYN) WRONG(&f, "%s: ELF type %u, expected %u (shared library)", name, header.e_type, ET_DYN);
  if (header.e_phentsize != sizeof(Elf64_Phdr)) WRONG(&f, "%s: program headers of %u bytes", name, header.e_phentsize);
  size_t table = (size_t)header.e_phnum * sizeof(Elf64_Phdr);
  Elf64_Phdr *segments = arena_take(a, table, 1);
  memcpy(segments, part(&f, header.e_phoff, table, "program headers"), table);
  f.segments = segments;
  f.count = header.e_phnum;
  const Elf64_Phdr *dynamic = NULL;
  bool loads = false;
  for (uint32_t i = 0; i < f.count; i++) {
    const Elf64_Phdr *s = &segments[i];
    part(&f, s->p_offset, s->p_filesz, "segments");
    if (s->p_type == PT_LOAD && s->p_memsz < s->p_filesz) WRONG(&f, "%s: a segment that is smaller in memory than in the file", name);
    loads = loads || s->p_type == PT_LOAD;
    if (s->p_type == PT_GNU_STACK) out.executable_stack = s->p_flags & PF_X;
    if (s->p_type == PT_DYNAMIC) {
      if (dynamic) WRONG(&f, "%s: two dynamic sections", name);
      dynamic = s;
    }
  }
  if (!loads || !dynamic) WRONG(&f, "%s: nothing to load", name);
  check_sections(&f, &header);
  if (dynamic->p_filesz > MOST * sizeof(Elf64_Dyn) || dynamic->p_filesz % sizeof(Elf64_Dyn))
    WRONG(&f, "%s: a dynamic section of %llu bytes", name, (unsigned long long)dynamic->p_filesz);
  uint64_t tags = dynamic->p_filesz / sizeof(Elf64_Dyn), used = 0, strings_at = 0, strings_size = 0, needs_at = 0, needs = 0;
  Elf64_Dyn *entries = TAKE(a, (size_t)tags + 1, Elf64_Dyn);
  memcpy(entries, part(&f, dynamic->p_offset, dynamic->p_filesz, "dynamic section"), dynamic->p_filesz);
  while (used < tags && entries[used].d_tag != DT_NULL) {
    const Elf64_Dyn *e = &entries[used++]; /* if two entries have one tag, the linker takes the later */
    if (e->d_tag == DT_STRTAB) strings_at = e->d_un.d_ptr;
    if (e->d_tag == DT_STRSZ) strings_size = e->d_un.d_val;
    if (e->d_tag == DT_VERNEED) needs_at = e->d_un.d_ptr;
    if (e->d_tag == DT_VERNEEDNUM) needs = e->d_un.d_val;
  }
  if (used == tags) WRONG(&f, "%s: the dynamic section does not end", name);
  const char *strings = (const char *)at_address(&f, strings_at, strings_size, "string table");
  out.needed = TAKE(a, (size_t)used + 1, const char *);
  for (uint64_t i = 0; i < used; i++)
    if (entries[i].d_tag == DT_NEEDED || entries[i].d_tag == DT_AUXILIARY || entries[i].d_tag == DT_FILTER)
      out.needed[out.needed_count++] = string(&f, strings, strings_size, entries[i].d_un.d_val);
  if (needs_at) versions(&f, &out, needs_at, needs, strings, strings_size);
  return out;
}
