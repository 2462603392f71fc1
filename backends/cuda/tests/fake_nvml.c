/* NVIDIA's management library as far as oarlock_cuda.nvml calls it, with the parameter types of nvml.h: two GPUs, the second cut in two. */
#include <string.h>

typedef void *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static long opened = 0;
static char gpus[2], parts[2];

static int put(const char *text, char *out, unsigned int length) {
  if (strlen(text) + 1 > length) return 7;
  strcpy(out, text);
  return 0;
}
int nvmlInit_v2(void) { opened++; return 0; }
int nvmlShutdown(void) { opened--; return 0; }
long fake_opened(void) { return opened; }
const char *nvmlErrorString(int code) { return code == 6 ? "Not Found" : "Other"; }
int nvmlSystemGetDriverVersion(char *out, unsigned int length) { return put("575.57.08", out, length); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 12090; return 0; }
int nvmlDeviceGetCount_v2(unsigned int *out) { *out = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *out) { *out = &gpus[index]; return index > 1 ? 2 : 0; }
static int is_part(nvmlDevice_t d) { return d == &parts[0] || d == &parts[1]; }
int nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned int length) { return put(is_part(d) ? "A part" : "A GPU", out, length); }
int nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned int length) {
  return put(d == &gpus[0] ? "GPU-a" : d == &gpus[1] ? "GPU-b" : d == &parts[0] ? "MIG-0" : "MIG-1", out, length);
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *out) {
  out->total = is_part(d) ? 20ULL << 30 : 80ULL << 30;
  out->free = 1; out->used = 2;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor) { *major = 8; *minor = d == &gpus[0] ? 9 : 0; return 0; }
int nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) {
  if (d == &gpus[0]) return 3;
  *current = 1; *pending = 0;
  return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned int *out) { *out = 3; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned int index, nvmlDevice_t *out) {
  if (index > 1) return 6;
  *out = &parts[index];
  return 0;
}
