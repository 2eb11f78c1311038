/* What the simulated device keeps in one file, which every process of a run maps: its size, its faults, who uses how
   much. Python writes the head (tests/fakes/cann/__init__.py has the same order); all numbers are 64 bits wide. */
#ifndef SIMULATED_DEVICE_H
#define SIMULATED_DEVICE_H
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 4
#define MAX_PROCESSES 64

typedef int aclError; /* CANN's names and numbers: acl/acl_rt.h, acl/error_codes/rt_error_codes.h */
enum {
    ACL_SUCCESS = 0,
    ACL_ERROR_RT_PARAM_INVALID = 107000,
    ACL_ERROR_RT_CONTEXT_NULL = 107002,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_API_NOT_SUPPORT = 200001,
    ACL_ERROR_RT_LOST_HEARTBEAT = 507010,
};

struct state {
    uint64_t total_bytes;            /* of each device */
    uint64_t devices;
    uint64_t refused_from_bytes;     /* an allocation of so many or more fails as on a full device; 0: none does */
    uint64_t copy_bytes_per_second;  /* between host and device; 0: as fast as memory is */
    uint64_t is_lost;                /* every call that needs the device fails */
    uint64_t used_bytes[MAX_PROCESSES][MAX_DEVICES];
};

#endif
