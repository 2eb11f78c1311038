/* A simulated NPU below the real torch_npu: memory that is counted, copies, and streams whose work is done at once.

   The state file that CANN_SIMULATED names is shared by every process of a run, so that one sees what the others use.
   A process has a slot in it for as long as it holds a lock on the slot's byte; the kernel drops that lock however the
   process ends, and what it used is free again, as a driver does it. Device memory is ordinary memory of the process,
   reserved and not touched before it is written.

   Not simulated: kernels and their workspaces, time, fragmentation below the allocator, links between devices. */
#define _GNU_SOURCE
#include "device.h"
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE ((size_t)2 << 20) /* of device memory */
#define SLOT_LOCKS ((off_t)1 << 40) /* locks may lie beyond a file's end */

API const char highwater_simulates[] = "CANN";

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct state *shared;
static int file = -1, slot = -1;
static pid_t owner;
static __thread int device = -1;

static void fail(const char *why) {
    fprintf(stderr, "simulated CANN: %s\n", why);
    abort();
}

static int lock_byte(off_t at, int command, int type) {
    struct flock lock = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    if (fcntl(file, command, &lock) != 0) return -1;
    return command == F_GETLK ? lock.l_type : 0;
}

/* Called with the guard held. A child of a fork has none of its parent's locks, and begins anew. */
static void open_state(void) {
    if (shared && owner == getpid()) return;
    const char *path = getenv("CANN_SIMULATED");
    if (!path || (file = open(path, O_RDWR | O_CLOEXEC)) < 0) fail("CANN_SIMULATED names no state file");
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) fail("the state file cannot be mapped");
    owner = getpid();
    for (slot = 0; lock_byte(SLOT_LOCKS + slot, F_SETLK, F_WRLCK) != 0; slot++)
        if (slot == MAX_PROCESSES - 1) fail("too many processes");
    memset(shared->used_bytes[slot], 0, sizeof shared->used_bytes[slot]); /* of one that has ended */
}

static void begin(void) {
    pthread_mutex_lock(&guard);
    open_state();
    lock_byte(0, F_SETLKW, F_WRLCK);
}

static void end(void) {
    lock_byte(0, F_SETLK, F_UNLCK);
    pthread_mutex_unlock(&guard);
}

static uint64_t used_by_all(int of) {
    uint64_t sum = 0;
    for (int other = 0; other < MAX_PROCESSES; other++) {
        if (other != slot && shared->used_bytes[other][of] && lock_byte(SLOT_LOCKS + other, F_GETLK, F_WRLCK) == F_UNLCK)
            memset(shared->used_bytes[other], 0, sizeof shared->used_bytes[other]);
        sum += shared->used_bytes[other][of];
    }
    return sum;
}

static aclError ready(void) {
    pthread_mutex_lock(&guard);
    open_state();
    aclError found = shared->is_lost ? ACL_ERROR_RT_LOST_HEARTBEAT : ACL_SUCCESS;
    pthread_mutex_unlock(&guard);
    return found;
}

static aclError take(size_t bytes, int of) {
    begin();
    aclError found = ACL_SUCCESS;
    uint64_t refused_from = shared->refused_from_bytes;
    if (shared->is_lost) found = ACL_ERROR_RT_LOST_HEARTBEAT;
    else if ((refused_from && bytes >= refused_from) || used_by_all(of) + bytes > shared->total_bytes)
        found = ACL_ERROR_RT_MEMORY_ALLOCATION;
    else shared->used_bytes[slot][of] += bytes;
    end();
    return found;
}

static void give(size_t bytes, int of) {
    begin();
    shared->used_bytes[slot][of] -= bytes;
    end();
}

/* What was handed out, by address: CANN's functions that take it back are not told how much it was. */
struct range {
    void *start;
    size_t bytes;
    int device;
    struct range *next;
};
enum kind { DEVICE, HOST, RESERVED, MAPPED, KINDS };
static struct range *ranges[KINDS];

static void *mapped(void *at, size_t bytes, int protection, int flags) {
    void *start = mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static void keep(enum kind kind, void *start, size_t bytes) {
    struct range *range = malloc(sizeof *range);
    pthread_mutex_lock(&guard);
    *range = (struct range){start, bytes, device, ranges[kind]};
    ranges[kind] = range;
    pthread_mutex_unlock(&guard);
}

static struct range forget(enum kind kind, const void *start) {
    struct range found = {0};
    pthread_mutex_lock(&guard);
    for (struct range **at = &ranges[kind]; *at; at = &(*at)->next)
        if ((*at)->start == start) {
            struct range *gone = *at;
            found = *gone;
            *at = gone->next;
            free(gone);
            break;
        }
    pthread_mutex_unlock(&guard);
    return found;
}

static aclError unmap(enum kind kind, void *start) {
    struct range range = forget(kind, start);
    if (!range.start) return ACL_ERROR_RT_PARAM_INVALID;
    munmap(range.start, range.bytes);
    if (kind == DEVICE) give(range.bytes, range.device);
    return ACL_SUCCESS;
}

/* --- devices --- */

API aclError aclInit(const char *config) { (void)config; return ready(); }
API aclError aclFinalize(void) { return ACL_SUCCESS; }
API const char *aclGetRecentErrMsg(void) { return "simulated CANN"; }
API const char *aclrtGetSocName(void) { return "Ascend910B3"; } /* torch_npu knows real ones only */
API aclError aclsysGetVersionStr(const char *package, char *version) {
    (void)package;
    strcpy(version, "8.5.0");
    return ACL_SUCCESS;
}

API aclError aclrtGetDeviceCount(uint32_t *count) {
    ready();
    *count = (uint32_t)shared->devices;
    return ACL_SUCCESS;
}

API aclError aclrtSetDevice(int32_t index) {
    aclError found = ready();
    if (found == ACL_SUCCESS && (index < 0 || (uint64_t)index >= shared->devices)) return ACL_ERROR_RT_PARAM_INVALID;
    if (found == ACL_SUCCESS) device = index;
    return found;
}

API aclError aclrtResetDevice(int32_t index) { (void)index; return ACL_SUCCESS; }

/* A thread without a device must be told so, or torch_npu's empty_cache passes over it. */
API aclError aclrtGetDevice(int32_t *index) {
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *index = device;
    return ACL_SUCCESS;
}

static char contexts[MAX_DEVICES];
API aclError aclrtGetCurrentContext(void **context) {
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = &contexts[device];
    return ACL_SUCCESS;
}
API aclError aclrtSetCurrentContext(void *context) {
    device = (int)((char *)context - contexts);
    return ACL_SUCCESS;
}
API aclError aclrtGetPrimaryCtxState(int32_t index, uint32_t *flags, int32_t *active) {
    (void)index;
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

API aclError aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    (void)kind;
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    begin();
    *total_bytes = shared->total_bytes;
    *free_bytes = shared->total_bytes - used_by_all(device);
    aclError found = shared->is_lost ? ACL_ERROR_RT_LOST_HEARTBEAT : ACL_SUCCESS;
    end();
    return found;
}

/* --- memory --- */

API aclError aclrtMalloc(void **start, size_t bytes, int policy) {
    (void)policy;
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    aclError found = take(bytes, device);
    if (found != ACL_SUCCESS) return found;
    *start = mapped(NULL, bytes, PROT_READ | PROT_WRITE, 0);
    if (!*start) fail("this machine has no memory left");
    keep(DEVICE, *start, bytes);
    return ACL_SUCCESS;
}
API aclError aclrtMallocAlign32(void **start, size_t bytes, int policy) { return aclrtMalloc(start, bytes, policy); }
API aclError aclrtMallocWithCfg(void **start, size_t bytes, int policy, void *config) {
    (void)config;
    return aclrtMalloc(start, bytes, policy);
}
API aclError aclrtFree(void *start) { return unmap(DEVICE, start); }

API aclError aclrtMallocHost(void **start, size_t bytes) {
    *start = mapped(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, 0);
    if (!*start) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    keep(HOST, *start, bytes ? bytes : 1);
    return ACL_SUCCESS;
}
API aclError aclrtFreeHost(void *start) { return unmap(HOST, start); }

/* Expandable segments: addresses first, then memory by handles. A handle has no contents of its own here: torch_npu
   gives one back with the mapping that had it. */
struct handle {
    size_t bytes;
    int device;
};

API aclError aclrtReserveMemAddress(void **start, size_t bytes, size_t alignment, void *wanted, uint64_t flags) {
    (void)alignment, (void)flags;
    *start = mapped(wanted, bytes, PROT_NONE, 0);
    if (!*start) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    keep(RESERVED, *start, bytes);
    return ACL_SUCCESS;
}
API aclError aclrtReleaseMemAddress(void *start) { return unmap(RESERVED, start); }

API aclError aclrtMallocPhysical(void **handle, size_t bytes, const void *properties, uint64_t flags) {
    (void)properties, (void)flags;
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    aclError found = take(bytes, device);
    if (found != ACL_SUCCESS) return found;
    struct handle *made = malloc(sizeof *made);
    *made = (struct handle){bytes, device};
    *handle = made;
    return ACL_SUCCESS;
}
API aclError aclrtFreePhysical(void *handle) {
    struct handle *gone = handle;
    give(gone->bytes, gone->device);
    free(gone);
    return ACL_SUCCESS;
}
API aclError aclrtMapMem(void *start, size_t bytes, size_t offset, void *handle, uint64_t flags) {
    (void)offset, (void)handle, (void)flags;
    if (!mapped(start, bytes, PROT_READ | PROT_WRITE, MAP_FIXED)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    keep(MAPPED, start, bytes);
    return ACL_SUCCESS;
}
API aclError aclrtUnmapMem(void *start) {
    struct range range = forget(MAPPED, start);
    if (!range.start) return ACL_ERROR_RT_PARAM_INVALID;
    mapped(start, range.bytes, PROT_NONE, MAP_FIXED);
    return ACL_SUCCESS;
}

/* --- copies, by the end of the call whether asynchronous or not --- */

API aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    aclError found = ready();
    if (found != ACL_SUCCESS) return found;
    if (bytes > room) return ACL_ERROR_RT_PARAM_INVALID;
    memcpy(to, from, bytes);
    const int between_host_and_device = kind == 1 || kind == 2; /* ACL_MEMCPY_HOST_TO_DEVICE, _DEVICE_TO_HOST */
    if (shared->copy_bytes_per_second && between_host_and_device) {
        double seconds = (double)bytes / (double)shared->copy_bytes_per_second;
        struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        nanosleep(&pause, NULL);
    }
    return ACL_SUCCESS;
}
API aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, bytes, kind);
}
API aclError aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return ACL_ERROR_RT_PARAM_INVALID;
    memset(to, value, bytes);
    return ready();
}
API aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) {
    (void)stream;
    return aclrtMemset(to, room, value, bytes);
}

/* --- streams and events: whatever was asked for is done --- */

static aclError made(void **object) {
    *object = calloc(1, 64);
    return ready();
}
API aclError aclrtCreateStream(void **stream) { return made(stream); }
API aclError aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    (void)priority, (void)flags;
    return made(stream);
}
API aclError aclrtCreateEventWithFlag(void **event, uint32_t flags) { (void)flags; return made(event); }
API aclError aclrtCreateEventExWithFlag(void **event, uint32_t flags) { (void)flags; return made(event); }
API aclError aclrtDestroyStream(void *stream) { free(stream); return ACL_SUCCESS; }
API aclError aclrtDestroyStreamForce(void *stream) { free(stream); return ACL_SUCCESS; }
API aclError aclrtDestroyEvent(void *event) { free(event); return ACL_SUCCESS; }
API aclError aclrtStreamQuery(void *stream, int *status) { (void)stream; *status = 0; return ready(); }
API aclError aclrtQueryEventStatus(void *event, int *status) { (void)event; *status = 1; return ready(); }
API aclError aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 1; return ready(); }
API aclError aclrtEventElapsedTime(float *milliseconds, void *from, void *to) {
    (void)from, (void)to;
    *milliseconds = 0;
    return ready();
}
#define DONE(name) API aclError name() { return ready(); }
DONE(aclrtSynchronizeDevice) DONE(aclrtSynchronizeDeviceWithTimeout)
DONE(aclrtSynchronizeStream) DONE(aclrtSynchronizeStreamWithTimeout)
DONE(aclrtSynchronizeEvent) DONE(aclrtSynchronizeEventWithTimeout)
DONE(aclrtRecordEvent) DONE(aclrtResetEvent) DONE(aclrtStreamWaitEvent)
