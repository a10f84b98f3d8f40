/* Whether a manifest agrees with itself and with the archive: docs/format.md, section 8, "What must agree". */
#ifndef AOTB_MANIFEST_CHECKS_H
#define AOTB_MANIFEST_CHECKS_H
#include "manifest.h"

/* That the archive holds the members that are listed, of their sizes, and no others. */
void check_members(const manifest *m, const archive *z);
void check_manifest(const manifest *m, const archive *z);
#endif
