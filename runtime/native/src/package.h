/* An open package: its archive and manifest, the target that fits this processor, and its weights. */
#ifndef AOTB_PACKAGE_H
#define AOTB_PACKAGE_H
#include "archive.h"
#include "backend.h"
#include "manifest.h"

struct aotb_package {
  arena a;
  archive z;
  manifest m;
  uint32_t target; /* index in the manifest */
  const backend *backend;
  bool unchecked; /* standalone also runs entries that were not compared on it */
  char *path;
  char digest[65];     /* SHA-256 of the manifest */
  unsigned references; /* of the caller and of functions */
};

/* Returns a whole member, in the arena, compared with its digest. */
const uint8_t *package_member(const struct aotb_package *p, arena *a, const char *name, size_t *size);

const char *kind_name(entry_kind kind);

/* Returns the entry of that name; NULL after aotb_fail if there is none. */
const entry_spec *package_entry(const struct aotb_package *p, const char *name);

void package_keep(struct aotb_package *p);
void package_drop(struct aotb_package *p);
#endif
