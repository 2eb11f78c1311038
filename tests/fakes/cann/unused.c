/* What torch_npu 2.13.0 links to besides: operators, descriptors, peers, profiling.

   Operators are computed on the CPU, above torch_npu (cpu_kernels), so that one which comes this far fails, and names
   itself. The rest accepts and does nothing. Without prototypes: the arguments are not looked at. */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ACCEPTED(name) API aclError name() { return ACL_SUCCESS; }
#define UNSUPPORTED(name) API aclError name() { return ACL_ERROR_API_NOT_SUPPORT; }
#define OBJECT(name) API void *name() { return calloc(1, 64); }
#define NUMBER(name, type, value) API aclError name { *number = (type)(value); return ACL_SUCCESS; }

API aclError aclopCompileAndExecute(const char *operator) {
    fprintf(stderr, "simulated CANN: the operator %s has no kernel here\n", operator);
    return ACL_ERROR_API_NOT_SUPPORT;
}
OBJECT(aclopCreateAttr) OBJECT(aclCreateDataBuffer) OBJECT(aclCreateTensorDesc)
API void aclopDestroyAttr(void *object) { free(object); }
API void aclDestroyTensorDesc(void *object) { free(object); }
API aclError aclDestroyDataBuffer(void *object) { free(object); return ACL_SUCCESS; }
ACCEPTED(aclGetTensorDescDimV2) ACCEPTED(aclGetTensorDescFormat) ACCEPTED(aclGetTensorDescNumDims)
ACCEPTED(aclGetTensorDescType) ACCEPTED(aclSetTensorDescName) ACCEPTED(aclSetTensorFormat)
ACCEPTED(aclSetTensorPlaceMent) ACCEPTED(aclSetTensorShape)
ACCEPTED(aclopSetAttrBool) ACCEPTED(aclopSetAttrDataType) ACCEPTED(aclopSetAttrFloat) ACCEPTED(aclopSetAttrInt)
ACCEPTED(aclopSetAttrListBool) ACCEPTED(aclopSetAttrListFloat) ACCEPTED(aclopSetAttrListInt)
ACCEPTED(aclopSetAttrListListInt) ACCEPTED(aclopSetAttrString)
ACCEPTED(aclSetCompileopt) ACCEPTED(aclopSetCompileFlag) ACCEPTED(aclrtSetOpWaitTimeout)
ACCEPTED(aclrtSetOpExecuteTimeOut) ACCEPTED(aclrtSetExceptionInfoCallback) ACCEPTED(aclrtSetDeviceSatMode)
ACCEPTED(aclrtSubscribeReport) ACCEPTED(aclrtUnSubscribeReport) ACCEPTED(aclrtLaunchCallback)
ACCEPTED(aclrtSetSysParamOpt) ACCEPTED(aclrtCtxSetSysParamOpt)
ACCEPTED(aclmdlInitDump) ACCEPTED(aclmdlSetDump) ACCEPTED(aclmdlFinalizeDump)
UNSUPPORTED(aclrtBinaryGetFunction) UNSUPPORTED(aclrtBinaryLoadFromData) UNSUPPORTED(aclrtGetFunctionAddr)
UNSUPPORTED(rtDevBinaryRegister) UNSUPPORTED(rtFunctionRegister) UNSUPPORTED(rtGetC2cCtrlAddr)
UNSUPPORTED(rtKernelLaunch)

/* One device cannot reach another: links are not simulated. */
UNSUPPORTED(aclrtDeviceEnablePeerAccess) UNSUPPORTED(aclrtMemExportToShareableHandle)
UNSUPPORTED(aclrtMemImportFromShareableHandle) UNSUPPORTED(aclrtMemSetPidToShareableHandle)
NUMBER(aclrtDeviceCanAccessPeer(int32_t *number), int32_t, 0)
NUMBER(aclrtDeviceGetBareTgid(int32_t *number), int32_t, getpid())

/* 24 cores of each kind, as an Ascend 910B3 has about. */
NUMBER(aclGetDeviceCapability(uint32_t device, int kind, int64_t *number), int64_t, 24)
NUMBER(aclrtGetDeviceResLimit(int32_t device, int kind, uint32_t *number), uint32_t, 24)
NUMBER(aclrtGetStreamResLimit(void *stream, int kind, uint32_t *number), uint32_t, 24)
NUMBER(aclrtGetSysParamOpt(int option, int64_t *number), int64_t, 0)
NUMBER(aclrtCtxGetSysParamOpt(int option, int64_t *number), int64_t, 0)
API size_t aclGetCompileoptSize(int option) { (void)option; return 64; }
ACCEPTED(aclGetCompileopt)

/* A thread of torch_npu's asks for reports all the time. */
API aclError aclrtProcessReport(int32_t milliseconds) { (void)milliseconds; usleep(1000); return ACL_SUCCESS; }
API void aclAppLog() {}
ACCEPTED(MsprofRegisterCallback) ACCEPTED(MsprofReportAdditionalInfo) ACCEPTED(MsprofReportApi)
ACCEPTED(MsprofReportCompactInfo)
API uint64_t MsprofGetHashId() { return 1; }
API uint64_t MsprofSysCycleTime(void) { return 0; }
