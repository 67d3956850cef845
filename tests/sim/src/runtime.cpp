// The CUDA runtime calls that the project's host code makes, on top of the simulator: link this instead of libcudart.
// Device memory is host memory. Kernels are found by name in the PTX that nvcc embedded (--no-compress,
// code=compute_90a).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>

#include "machine.h"
#include "runtime.h"
#include "tensor_map.h"

namespace moksim {

static thread_local int host_rank = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local std::string last_error_text;

void set_host_rank(int rank) {
    host_rank = rank;
}

static cudaError_t fail(cudaError_t error, const std::string& text) {
    last_error = error;
    last_error_text = text;
    return error;
}

uint64_t queue_of(const void* stream) {
    return static_cast<uint64_t>(host_rank) << 48 ^ reinterpret_cast<uint64_t>(stream);
}

static std::string report_text() {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    return m.reports.empty() ? "the launch failed" : m.reports.front().kind + ": " + m.reports.front().text;
}

// Launches block here, and ranks that are threads of one Python process wait for each other: the global interpreter
// lock, which the bindings keep during a launch, must not be held meanwhile.
class WithoutInterpreterLock {
  public:
    WithoutInterpreterLock() {
        auto holds_lock = find<int (*)()>("PyGILState_Check");
        if (holds_lock && holds_lock()) state_ = find<void* (*)()>("PyEval_SaveThread")();
    }
    ~WithoutInterpreterLock() {
        if (state_) find<void (*)(void*)>("PyEval_RestoreThread")(state_);
    }

  private:
    template <class F>
    static F find(const char* name) {
        return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
    }
    void* state_ = nullptr;
};

cudaError_t launch_kernel(LoadedModule* module, LaunchRequest request) {
    const WithoutInterpreterLock unlocked;
    try {
        request.rank = host_rank;
        const auto launch = Machine::get().launch(module, request);
        if (launch->is_done && launch->error) return fail(static_cast<cudaError_t>(launch->error), report_text());
        return cudaSuccess;
    } catch (const std::exception& e) {
        return fail(cudaErrorInvalidValue, e.what());
    }
}

namespace {

struct FatBinary {
    std::vector<std::string> ptx;
    std::vector<LoadedModule*> modules;  // parsed at the first use
};

struct HostFunction {
    FatBinary* binary;
    std::string name;
};

std::unordered_map<const void*, HostFunction>& host_functions() {
    static std::unordered_map<const void*, HostFunction> all;
    return all;
}

struct FatEntry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t payload_bytes;
    uint32_t compressed_bytes, unknown;
    uint16_t minor, major;
    uint32_t architecture, name_offset, name_bytes;
    uint64_t flags;
};
constexpr uint16_t kPtxKind = 1;
constexpr uint64_t kCompressedFlags = 0x2000 | 0x8000;

std::vector<std::string> find_ptx(const uint8_t* fat) {
    uint32_t magic;
    uint16_t header_bytes;
    uint64_t bytes;
    memcpy(&magic, fat, 4), memcpy(&header_bytes, fat + 6, 2), memcpy(&bytes, fat + 8, 8);
    std::vector<std::string> found;
    if (magic != 0xBA55ED50) return found;
    for (uint64_t at = header_bytes; at < header_bytes + bytes;) {
        FatEntry entry;
        memcpy(&entry, fat + at, sizeof entry);
        const char* payload = reinterpret_cast<const char*>(fat + at + entry.header_bytes);
        if (entry.kind == kPtxKind) {
            if (entry.flags & kCompressedFlags)
                fprintf(stderr, "mok simulator: embedded PTX is compressed: build with nvcc --no-compress\n"), abort();
            found.emplace_back(payload, strnlen(payload, entry.payload_bytes));
        }
        at += entry.header_bytes + entry.payload_bytes;
    }
    return found;
}

std::mutex binaries_mutex;
std::vector<FatBinary*> binaries;

LoadedModule* module_of(const HostFunction& f) {
    std::lock_guard lock(binaries_mutex);
    FatBinary& b = *f.binary;
    if (b.modules.empty())
        for (auto& text : b.ptx) b.modules.push_back(Machine::get().load(text));
    for (auto* module : b.modules)
        for (auto& function : module->module.functions)
            if (function->name == f.name && !function->is_declaration) return module;
    throw PtxError("no PTX of " + f.name + " is embedded");
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, dim3 cluster, void** args, size_t shared,
                   void* stream) {
    auto found = host_functions().find(function);
    if (found == host_functions().end()) return fail(cudaErrorInvalidDeviceFunction, "unknown kernel");
    try {
        LaunchRequest r;
        r.kernel = found->second.name;
        const dim3 shapes[] = {grid, block, cluster};
        uint32_t* to[] = {r.grid, r.block, r.cluster};
        for (int i = 0; i < 3; ++i) to[i][0] = shapes[i].x, to[i][1] = shapes[i].y, to[i][2] = shapes[i].z;
        r.dynamic_shared = static_cast<uint32_t>(shared);
        r.args = args;
        r.queue = queue_of(stream);
        return launch_kernel(module_of(found->second), r);
    } catch (const std::exception& e) {
        return fail(cudaErrorInvalidValue, e.what());
    }
}

struct CallConfiguration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local std::vector<CallConfiguration> call_configurations;

cudaError_t allocate(void** pointer, size_t bytes, bool is_initialized) {
    Machine& m = Machine::get();
    *pointer = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    memset(*pointer, 0xff, bytes);
    std::lock_guard lock(m.mutex);
    m.memory.add(reinterpret_cast<Addr>(*pointer), bytes, "allocation of " + std::to_string(bytes) + " bytes", false,
                 is_initialized);
    return cudaSuccess;
}

cudaError_t release(void* pointer) {
    if (!pointer) return cudaSuccess;
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    m.memory.remove(reinterpret_cast<Addr>(pointer));
    free(pointer);
    return cudaSuccess;
}

// Host copies into device memory initialise it.
void mark_written(void* to, size_t bytes) {
    Machine& m = Machine::get();
    std::lock_guard lock(m.mutex);
    Region* r = m.memory.find(reinterpret_cast<Addr>(to));
    if (!r || r->is_initialized) return;
    const uint64_t offset = reinterpret_cast<Addr>(to) - r->base;
    for (uint64_t i = offset; i < offset + bytes; ++i)
        r->cell(i).initialized |= static_cast<uint16_t>(1u << i % kGranule);
}

CUresult encode_tiled(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    // Sizes by CUtensorMapDataType, and the driver API's rules for cuTensorMapEncodeTiled.
    static const uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    if (rank < 1 || rank > 5 || static_cast<size_t>(type) >= sizeof sizes) return CUDA_ERROR_INVALID_VALUE;
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
        return CUDA_ERROR_INVALID_VALUE;
    if (!base || reinterpret_cast<uint64_t>(base) % 16) return CUDA_ERROR_INVALID_VALUE;
    TensorMap map = {};
    map.magic = TensorMap::kMagic;
    map.base = reinterpret_cast<uint64_t>(base);
    map.rank = static_cast<uint8_t>(rank);
    map.element_bytes = sizes[type];
    map.swizzle = static_cast<uint8_t>(swizzle);
    map.is_bf16 = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    map.is_float = type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    map.is_signed = type == CU_TENSOR_MAP_DATA_TYPE_INT32 || type == CU_TENSOR_MAP_DATA_TYPE_INT64;
    map.fills_nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    for (cuuint32_t i = 0; i < rank; ++i) {
        if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        map.dims[i] = static_cast<uint32_t>(dims[i]);
        map.box[i] = static_cast<uint16_t>(box[i]);
        if (i == 0) continue;
        if (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
        map.strides[i - 1] = strides[i - 1];
    }
    const uint32_t row_bytes = box[0] * map.element_bytes;
    if (row_bytes % 16 || (swizzle && row_bytes > 16u << swizzle)) return CUDA_ERROR_INVALID_VALUE;
    memset(result, 0, sizeof *result);
    memcpy(result, &map, sizeof map);
    return CUDA_SUCCESS;
}

// The one binary that has an entry of this name.
FatBinary* binary_with(const std::string& kernel) {
    std::vector<FatBinary*> found;
    for (auto* b : binaries) {
        if (b->ptx.size() != 1) continue;
        for (size_t at = 0; (at = b->ptx[0].find(".entry ", at)) != std::string::npos; ++at) {
            if (b->ptx[0].substr(at, b->ptx[0].find('(', at) - at).find(kernel) == std::string::npos) continue;
            found.push_back(b);
            break;
        }
    }
    if (found.size() != 1)
        throw PtxError("expected one source file with a kernel like " + kernel + ", got " +
                       std::to_string(found.size()));
    return found[0];
}

}  // namespace

std::string embedded_ptx(const std::string& kernel) {
    std::lock_guard lock(binaries_mutex);
    return binary_with(kernel)->ptx[0];
}

void replace_ptx(const std::string& kernel, const std::string& text) {
    std::lock_guard lock(binaries_mutex);
    FatBinary* b = binary_with(kernel);
    b->ptx = {text};
    b->modules.clear();
}

void* tensor_map_encoder() {
    return reinterpret_cast<void*>(&encode_tiled);
}

}  // namespace moksim

using namespace moksim;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
    struct Wrapper {
        int magic, version;
        const uint8_t* data;
        void* more;
    };
    auto* binary = new FatBinary{find_ptx(static_cast<Wrapper*>(wrapper)->data), {}};
    std::lock_guard lock(binaries_mutex);
    binaries.push_back(binary);
    return reinterpret_cast<void**>(binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** handle, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
    host_functions()[function] = {reinterpret_cast<FatBinary*>(handle), name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) {
    return 1;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    call_configurations.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    const CallConfiguration c = call_configurations.back();
    call_configurations.pop_back();
    *grid = c.grid, *block = c.block, *shared = c.shared;
    *static_cast<void**>(stream) = c.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                               cudaStream_t stream) {
    return launch(kernel, grid, block, dim3(1, 1, 1), args, shared, stream);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                                    cudaStream_t stream) {
    return __cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t stream) {
    return launch(function, grid, block, dim3(1, 1, 1), args, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
    dim3 cluster(1, 1, 1);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const auto& a = config->attrs[i];
        if (a.id == cudaLaunchAttributeClusterDimension)
            cluster = dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
        if (a.id == cudaLaunchAttributeCooperative && a.val.cooperative) {
            const Config& c = Machine::get().config;
            const uint64_t ctas = uint64_t{config->gridDim.x} * config->gridDim.y * config->gridDim.z;
            if (ctas > static_cast<uint64_t>(c.num_sms) * c.max_ctas_per_sm)
                return fail(cudaErrorCooperativeLaunchTooLarge, "cooperative launch of more CTAs than fit");
        }
    }
    return launch(function, config->gridDim, config->blockDim, cluster, args, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
        value + static_cast<int>(kSharedReserved) > static_cast<int>(kSharedMax))
        return fail(cudaErrorInvalidValue, "more shared memory than a block can have");
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 128;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = Machine::get().config.max_ctas_per_sm;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* f, int n, size_t s,
                                                                   unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, n, s);
}

cudaError_t cudaGetDevice(int* device) {
    return *device = 0, cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    return *count = 1, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const Config& c = Machine::get().config;
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = c.num_sms;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = 9;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(kSharedMax - kSharedReserved);
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = static_cast<int>(kSharedMax);
            break;
        case cudaDevAttrCooperativeLaunch:
            *value = 1;
            break;
        case cudaDevAttrClockRate:
            *value = 1000000;
            break;
        default:
            return fail(cudaErrorInvalidValue, "device attribute " + std::to_string(attribute) + " is not simulated");
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "mok simulator");
    properties->major = 9;
    properties->multiProcessorCount = Machine::get().config.num_sms;
    properties->sharedMemPerBlockOptin = kSharedMax - kSharedReserved;
    properties->warpSize = kLanes;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    return allocate(pointer, bytes, false);
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
    return allocate(pointer, bytes, false);
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    return allocate(pointer, bytes, true);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    return allocate(pointer, bytes, true);
}
cudaError_t cudaFree(void* pointer) {
    return release(pointer);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
    return release(pointer);
}
cudaError_t cudaFreeHost(void* pointer) {
    return release(pointer);
}

cudaError_t cudaDeviceSynchronize() {
    const int error = Machine::get().synchronize(0, true);
    return error ? fail(static_cast<cudaError_t>(error), report_text()) : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const int error = Machine::get().synchronize(queue_of(stream), false);
    return error ? fail(static_cast<cudaError_t>(error), report_text()) : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    const cudaError_t error = cudaStreamSynchronize(stream);
    memcpy(to, from, bytes);
    mark_written(to, bytes);
    return error;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    const cudaError_t error = cudaStreamSynchronize(stream);
    memset(to, value, bytes);
    mark_written(to, bytes);
    return error;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    static std::atomic<uintptr_t> next{16};
    *stream = reinterpret_cast<cudaStream_t>(next++);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
    return cudaStreamSynchronize(stream);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return cudaStreamCreate(reinterpret_cast<cudaStream_t*>(event));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
    return cudaStreamSynchronize(stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
    return *ms = 1, cudaSuccess;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() {
    return last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess              ? "cudaSuccess"
           : error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure"
                                             : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : last_error_text.c_str();
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    const bool is_known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *entry = is_known ? tensor_map_encoder() : nullptr;
    if (result) *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** entry, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
    return cudaGetDriverEntryPointByVersion(name, entry, 0, flags, result);
}

}  // extern "C"
