// Large float32 matrix products by oneDNN on processors where it is faster than MKL, which PyTorch's mm calls. The process decides, so that one
// library serves both kinds of machine. The functions are weak: without PyTorch they do not exist.
#include <cpuid.h>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>

extern "C" __attribute__((weak)) decltype(aoti_torch_cpu__linear_pointwise) aoti_torch_cpu__linear_pointwise;
extern "C" __attribute__((weak)) decltype(aoti_torch_call_dispatcher) aoti_torch_call_dispatcher;
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
    bool is_transposed() const { return stride[0] == 1 && stride[1] == size[0]; }
    // Otherwise oneDNN has no fast code.
    bool is_dense() const { return (stride[1] == 1 && stride[0] == size[1]) || is_transposed(); }
};

// Return y transposed: its memory as oneDNN's weight.
RAIIAtenTensorHandle weight_of(AtenTensorHandle y, const Matrix& right) {
    const int64_t size[] = {right.size[1], right.size[0]}, stride[] = {right.stride[1], right.stride[0]};
    AtenTensorHandle weight = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(y, 2, size, stride, 0, &weight));
    return RAIIAtenTensorHandle(weight);
}

void onednn_product(RAIIAtenTensorHandle& out, AtenTensorHandle x, AtenTensorHandle weight) {
    AtenTensorHandle computed = nullptr;
    out.reset();  // first, so that the new tensor can have its memory
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__linear_pointwise(x, weight, nullptr, "none", nullptr, 0, nullptr, &computed));
    out = RAIIAtenTensorHandle(computed);
}

enum class Library { mkl, onednn, onednn_unless_transposed };

// On AMD's processors with AVX-512, MKL uses only half the width of their registers. Measured on Zen 4 with one and two threads, oneDNN makes
// the gradients of an MLP of 1.9 million parameters 1.10 and 1.16 times as fast, and those of a BERT of 5.4 million 1.05 and 1.04 times.
Library faster_library() {
    static const Library chosen = [] {
        if (!aoti_torch_cpu__linear_pointwise || core_serves) return Library::mkl;
        const char* library = std::getenv("AOT_BACKWARD_PRODUCTS");
        if (library && *library) {
            if (std::strcmp(library, "mkl") && std::strcmp(library, "onednn"))
                throw std::runtime_error(std::string("AOT_BACKWARD_PRODUCTS: expected mkl or onednn, got ") + library);
            return std::strcmp(library, "onednn") ? Library::mkl : Library::onednn;
        }
        unsigned a, b = 0, c, d;
        if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__builtin_cpu_supports("avx512f")) return Library::mkl;
        // oneDNN gets a copy of x if x is transposed, as in the gradient of a weight; one thread makes it. On Zen 4, with 512-bit operations of
        // two halves, the libraries differ less than that: 768 x 2048 x 192 take MKL 6.0 ms on one thread and 3.0 on two, oneDNN 7.1 and 4.8.
        // On Zen 5 oneDNN is faster even so (185 GFLOP/s, MKL 105).
        return __builtin_cpu_is("amdfam19h") ? Library::onednn_unless_transposed : Library::onednn;
    }();
    return chosen;
}

// A product with few rows or columns is limited by memory.
bool is_large(int64_t rows, int64_t inner, int64_t columns) {
    return rows >= 16 && inner >= 16 && columns >= 16 && rows * inner * columns >= LEAST_PRODUCT;
}

// Write x times y to ``out``, or a new tensor with that product into ``out``'s place, which must not share its memory with another tensor.
void matrix_product(RAIIAtenTensorHandle& out, AtenTensorHandle x, AtenTensorHandle y) {
    if (faster_library() != Library::mkl) {
        const Matrix left(x), right(y), result(out);
        const bool is_usual = left.dtype == aoti_torch_dtype_float32() && left.is_dense() && right.is_dense();
        const bool copies = left.is_transposed() && faster_library() == Library::onednn_unless_transposed;
        if (is_usual && !copies && is_large(left.size[0], left.size[1], right.size[1]) && result.stride[1] == 1 &&
            result.stride[0] == right.size[1])
            return onednn_product(out, x, weight_of(y, right));
    }
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out, x, y));
}

// The products of a loop with one y. If y is a weight transposed (x Wᵀ), oneDNN's copy of it is made once; x W is as fast without one.
// One thread and two, x of 16 rows, W of 1024 x 256: x Wᵀ takes MKL 112 and 77 µs, oneDNN 91 and 54 and its copy 171 and 146; x W takes MKL 105
// and 68 µs, oneDNN 91 and 53. With a W of 512 x 128 both take 30 µs. Measured with 4 to 32 rows.
class LoopProduct {
    RAIIAtenTensorHandle packed;

public:
    void operator()(RAIIAtenTensorHandle& out, AtenTensorHandle x, AtenTensorHandle y) {
        if (faster_library() == Library::mkl) return matrix_product(out, x, y);
        const Matrix left(x), right(y), result(out);
        const int64_t rows = left.size[0], inner = right.size[0], columns = right.size[1];
        const bool pays = rows >= 4 && rows < 128 && inner >= 16 && columns >= 16 && inner * columns >= LEAST_LOOP_WEIGHT;
        const bool is_usual = left.dtype == aoti_torch_dtype_float32() && left.is_dense() && right.is_dense();
        if (!pays || !is_usual || result.stride[1] != 1 || result.stride[0] != columns) return matrix_product(out, x, y);
        RAIIAtenTensorHandle weight = weight_of(y, right);
        if (right.stride[1] == 1) return onednn_product(out, x, weight);
        if (!packed.get()) {
            StableIValue stack[] = {reinterpret_cast<StableIValue>(weight.release()),
                                    reinterpret_cast<StableIValue>(new StableIValue(rows))};
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("mkldnn::_reorder_linear_weight", "", stack));
            packed = RAIIAtenTensorHandle(reinterpret_cast<AtenTensorHandle>(stack[0]));
        }
        onednn_product(out, x, packed);
    }
};
}  // namespace
