/* CUDA's driver as far as a compiled library calls it, for a machine without one: memory is the host's, and a launch is handed to `play`.

   Opened before torch with its symbols global, so that the library finds these before CUDA's and torch's own. In the place of each
   aoti_torch_cuda_<operator> stands a jump to the function of the CPU; the lines for it are generated and appended. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t (*play_t)(const void *image, const char *name, const uint32_t *grid, const uint32_t *threads, uint32_t shared, void **arguments);
play_t play;

struct function { const void *image; char *name; };

int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return 0; }
int cuModuleGetFunction(struct function **function, void *module, const char *name) {
  *function = malloc(sizeof **function);
  (*function)->image = module;
  (*function)->name = strdup(name);
  return 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuGetErrorString(int code, const char **words) { *words = "the launch failed, see above"; return 0; }
int cuLaunchKernel(struct function *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t tx, uint32_t ty, uint32_t tz, uint32_t shared,
                   void *stream, void **arguments, void **extra) {
  uint32_t grid[3] = {gx, gy, gz}, threads[3] = {tx, ty, tz};
  return play(function->image, function->name, grid, threads, shared, arguments);
}

const char *cudaGetErrorString(int code) { return "no CUDA here"; }
int cudaGetLastError(void) { return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaEventCreate(void **event) { *event = NULL; return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }
int cudaEventDestroy(void *event) { return 0; }

int32_t aoti_torch_create_cuda_stream_guard(void *stream, int32_t device, void **guard) { *guard = NULL; return 0; }
int32_t aoti_torch_delete_cuda_stream_guard(void *guard) { return 0; }
int32_t aoti_torch_create_cuda_guard(int32_t device, void **guard) { *guard = NULL; return 0; }
int32_t aoti_torch_delete_cuda_guard(void *guard) { return 0; }

/* All that the library sees is on a GPU, its own device too, which the caller names "cpu"; all that it allocates is on the CPU. */
int32_t aoti_torch_device_type_cuda(void) { return 1; }
int32_t aoti_torch_device_type_cpu(void) { return 1; }
int32_t aoti_torch_get_device_type(void *tensor, int32_t *type) { *type = 1; return 0; }
int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, void **);
int32_t aoti_torch_empty_strided(int64_t dimensions, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index,
                                 void **tensor) {
  return empty_strided(dimensions, sizes, strides, dtype, 0, 0, tensor);
}
