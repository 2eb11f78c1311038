# The volume outlives a container, and of a new one no process runs yet: what vLLM and its libraries left goes. Nothing
# else does, nor is it looked for in /dev/shm: a device driver may have mounted a folder of the node there (NVIDIA's MPS).
(cd /run/highwater/shm && rm -f -- psm_* vllm_* VLLM_OBJECT_STORAGE_SHM_BUFFER* lmcache* mooncake* nccl-* rccl-* hccl* \
  HCCL* torch_* shm_torch* plasma* sem.* __KMP_REGISTERED_LIB_* *-cpushm*)
