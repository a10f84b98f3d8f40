// Large float32 matrix products by oneDNN on processors where it is faster than MKL, which PyTorch's mm calls. The process decides, so that one
// library serves both kinds of machine. The functions are weak: without PyTorch they do not exist.
#include <cpuid.h>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>

extern "C" __attribute__((weak)) decltype(aoti_torch_cpu__linear_pointwise) aoti_torch_cpu__linear_pointwise;
extern "C" __attribute__((weak)) decltype(aoti_torch_get_sizes) aoti_torch_get_sizes;
extern "C" __attribute__((weak)) decltype(aoti_torch_get_strides) aoti_torch_get_strides;
extern "C" __attribute__((weak)) decltype(aoti_torch_get_dtype) aoti_torch_get_dtype;
extern "C" __attribute__((weak)) void core_serves();  // of the C library's core, whose tensors are not PyTorch's

namespace {
using torch::aot_inductor::RAIIAtenTensorHandle;

struct Matrix {
    int64_t *size = nullptr, *stride = nullptr;
    int32_t dtype = -1;

    explicit Matrix(AtenTensorHandle tensor) {
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &size));
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &stride));
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    }
    // Otherwise oneDNN has no fast code.
    bool is_dense() const { return (stride[1] == 1 && stride[0] == size[1]) || (stride[0] == 1 && stride[1] == size[0]); }
};

// How fast oneDNN is beside MKL. On AMD's processors with AVX-512, MKL uses only half the width of its registers.
enum Speed { SLOWER, FASTER, TWICE };

Speed onednn() {
    static const Speed speed = [] {
        if (!aoti_torch_cpu__linear_pointwise || core_serves) return SLOWER;
        const char* wanted = std::getenv("AOT_BACKWARD_PRODUCTS");
        if (wanted && *wanted) {
            if (std::strcmp(wanted, "mkl") && std::strcmp(wanted, "onednn"))
                throw std::runtime_error(std::string("AOT_BACKWARD_PRODUCTS: expected mkl or onednn, got ") + wanted);
            return std::strcmp(wanted, "onednn") ? SLOWER : TWICE;
        }
        unsigned a = 0, b = 0, c, d;
        if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__builtin_cpu_supports("avx512f")) return SLOWER;
        __get_cpuid(1, &a, &b, &c, &d);
        const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
        return family >= 0x1a ? TWICE : FASTER;  // Zen 5 has units as wide as its registers, Zen 4 half as wide
    }();
    return speed;
}

// oneDNN compiles code for each new size, in 0.2 to 0.8 ms. That pays if sizes stay the same, or for a product that takes longer. Measured on Zen 4,
// with 1 and 2 threads: an MLP of 1.9 million parameters 1.10 and 1.16 times as fast as with MKL, a BERT of 5.4 million 1.05 and 1.04; below 2^23
// multiplications 0.3 to 1.0. A product with few rows or columns is limited by memory, and oneDNN's is given a copy of x if x is transposed.
bool is_large(int64_t rows, int64_t inner, int64_t columns) {
    const int64_t least = !SIZES_ARE_OPEN ? 1 << 23 : onednn() == TWICE ? 1 << 26 : 1 << 28;
    return rows >= 16 && inner >= 16 && columns >= 16 && rows * inner * columns >= least;
}

// Write x times y to ``out``, or a new tensor with that product into ``out``'s place, which must not share its memory with another tensor.
void matrix_product(RAIIAtenTensorHandle& out, AtenTensorHandle x, AtenTensorHandle y) {
    if (onednn() != SLOWER) {
        const Matrix left(x), right(y), result(out);
        const bool is_usual = left.dtype == aoti_torch_dtype_float32() && left.is_dense() && right.is_dense();
        if (is_usual && is_large(left.size[0], left.size[1], right.size[1]) && result.stride[1] == 1 &&
            result.stride[0] == right.size[1]) {
            const int64_t size[] = {right.size[1], right.size[0]}, stride[] = {right.stride[1], right.stride[0]};
            AtenTensorHandle transposed = nullptr, computed = nullptr;
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(y, 2, size, stride, 0, &transposed));
            const RAIIAtenTensorHandle weight(transposed);
            out.reset();  // first, so that the new tensor can have its memory
            AOTI_TORCH_ERROR_CODE_CHECK(
                aoti_torch_cpu__linear_pointwise(x, weight.get(), nullptr, "none", nullptr, 0, nullptr, &computed));
            out = RAIIAtenTensorHandle(computed);
            return;
        }
    }
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out, x, y));
}
}  // namespace
