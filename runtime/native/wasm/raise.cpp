// What compiled code throws if an operator fails; libstdc++ has a function for it.
#include <stdexcept>

extern "C" void raise_runtime_error(const char *words) { throw std::runtime_error(words); }
