/* What vllm-ascend's allocator for sleep mode takes of CANN's header; the stand-in for CANN reads no property. */
#include <stddef.h>
#include <stdint.h>

typedef int aclError;
typedef void *aclrtContext, *aclrtStream, *aclrtDrvMemHandle;
enum {
    ACL_MEM_HANDLE_TYPE_NONE = 0,
    ACL_MEM_ALLOCATION_TYPE_PINNED = 0,
    ACL_HBM_MEM_HUGE = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE = 1,
    ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_RT_CONTEXT_NULL = 107002
};
typedef struct {
    int handleType, allocationType, memAttr;
    struct {
        uint32_t id;
        int type;
    } location;
    uint64_t reserve;
} aclrtPhysicalMemProp;

aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t bytes, const aclrtPhysicalMemProp *of, uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
aclError aclrtMapMem(void *start, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *start);
aclError aclrtReserveMemAddress(void **start, size_t bytes, size_t alignment, void *wanted, uint64_t flags);
aclError aclrtReleaseMemAddress(void *start);

/* Not in the stand-in: torch_npu makes the context before the allocator is used. */
static inline aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
    (void)context, (void)device;
    return ACL_ERROR_RT_CONTEXT_NULL;
}
static inline aclError aclrtMemGetAllocationGranularity(const aclrtPhysicalMemProp *of, int kind, size_t *bytes) {
    (void)of, (void)kind;
    *bytes = 2 << 20; /* a huge page */
    return 0;
}
