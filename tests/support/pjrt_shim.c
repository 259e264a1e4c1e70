// A plugin of PJRT's C API that stands before one for the CPU, so that torch_tpu accepts it in libtpu's place:
// - it drops the TPU's options when a client is made, and says that each result is in the memory "device";
// - a process with a RANK has that one of the CPU's devices alone, as with one chip;
// - it has the topology of one chip, for which programs with kernels ask;
// - it counts compiles and executions (shim_counts).
// SHIM_REAL is the path of the plugin for the CPU. Build: gcc -O2 -shared -fPIC -I HEADERS pjrt_shim.c -o shim.so -ldl
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/pjrt/c/pjrt_c_api.h"
#include "xla/pjrt/c/pjrt_c_api_tpu_topology_extension.h"

static const PJRT_Api* real;
static char table[1 << 16];
static long compiles, executions;

static PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  args->num_options = 0;
  return real->PJRT_Client_Create(args);
}

static PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* args) {
  PJRT_Error* error = real->PJRT_Client_AddressableDevices(args);
  const char* rank = getenv("RANK");
  if (!error && rank) args->addressable_devices += atoi(rank), args->num_addressable_devices = 1;
  return error;
}

static PJRT_Error* output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  PJRT_Executable_NumOutputs_Args outputs = {.struct_size = sizeof outputs, .executable = args->executable};
  PJRT_Error* error = real->PJRT_Executable_NumOutputs(&outputs);
  if (error) return error;
  const char** kinds = malloc(outputs.num_outputs * sizeof *kinds + 1);
  size_t* sizes = malloc(outputs.num_outputs * sizeof *sizes + 1);
  for (size_t i = 0; i < outputs.num_outputs; i++) kinds[i] = "device", sizes[i] = strlen("device");
  args->num_outputs = outputs.num_outputs, args->memory_kinds = kinds, args->memory_kind_sizes = sizes;
  return NULL;
}

static PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  __sync_add_and_fetch(&compiles, 1);
  return real->PJRT_Client_Compile(args);
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  __sync_add_and_fetch(&executions, 1);
  return real->PJRT_LoadedExecutable_Execute(args);
}

static PJRT_Error* one_chip(PJRT_TpuTopology_ChipCount_Args* args) {
  args->chip_count = 1;
  return NULL;
}

static PJRT_Error* bounds(PJRT_TpuTopology_ChipBounds_Args* args) {
  for (size_t i = 0; i < 3 && i < args->chip_bounds_max_dims; i++) args->chip_bounds[i] = 1;
  args->chip_bounds_num_dims = 3;
  return NULL;
}

static PJRT_Error* whole_links(PJRT_TpuTopology_HasLimitedIciConnectivity_Args* args) {
  args->has_limited_ici_connectivity = false;
  return NULL;
}

static PJRT_TpuTopology_Extension topology;

void shim_counts(long* out) { out[0] = compiles, out[1] = executions; }

const PJRT_Api* GetPjrtApi(void) {
  if (real) return (const PJRT_Api*)table;
  void* handle = dlopen(getenv("SHIM_REAL"), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    fprintf(stderr, "shim: %s\n", dlerror());
    return NULL;
  }
  const PJRT_Api* (*get)(void) = (const PJRT_Api* (*)(void))dlsym(handle, "GetPjrtApi");
  real = get();
  memcpy(table, real, real->struct_size);
  PJRT_Api* mine = (PJRT_Api*)table;
  topology.base.struct_size = sizeof topology;
  topology.base.type = PJRT_Extension_Type_TpuTopology;
  topology.base.next = mine->extension_start;
  topology.chip_count = one_chip;
  // The counts have structures of the same form: a size, the topology, and the number.
  topology.process_count = (void*)one_chip, topology.chips_per_process = (void*)one_chip;
  topology.core_count_per_chip = (void*)one_chip, topology.core_count = (void*)one_chip;
  topology.core_count_per_process = (void*)one_chip, topology.logical_device_count = (void*)one_chip;
  topology.logical_device_count_per_process = (void*)one_chip;
  topology.logical_device_count_per_chip = (void*)one_chip;
  topology.chip_bounds = bounds, topology.process_bounds = (void*)bounds;
  topology.chips_per_process_bounds = (void*)bounds;
  topology.has_limited_ici_connectivity = whole_links;
  mine->extension_start = &topology.base;
  mine->PJRT_Client_Create = client_create;
  mine->PJRT_Client_AddressableDevices = addressable_devices;
  mine->PJRT_Executable_OutputMemoryKinds = output_memory_kinds;
  mine->PJRT_Client_Compile = compile;
  mine->PJRT_LoadedExecutable_Execute = execute;
  return mine;
}
