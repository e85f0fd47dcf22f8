// The verbs functions that kvferry calls, as one table: the only header of the library that includes
// verbs.h. Tests put a scripted NIC in its place.
#pragma once

#include <cstddef>
#include <cstdint>

#include <infiniband/verbs.h>

#include <kvferry/runtime/transfer.hpp>
#include <kvferry/transports/verbs/cm_api.hpp>

namespace kvferry::verbs {

/// Every function means what its manual page says of ibv_<name>; errno is set where libibverbs sets it.
/// Thread-safe where libibverbs is.
class Api {
 public:
  virtual ~Api() = default;

  /// The clock that limits of time are measured with: a simulated device has one of its own.
  virtual TimePoint now() const { return Clock::now(); }

  // ---- devices
  virtual ibv_device** get_device_list(int* count) = 0;
  virtual void free_device_list(ibv_device** list) = 0;
  virtual const char* get_device_name(ibv_device* device) = 0;
  virtual ibv_context* open_device(ibv_device* device) = 0;
  virtual int close_device(ibv_context* context) = 0;
  virtual int query_device(ibv_context* context, ibv_device_attr* attributes) = 0;
  virtual int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) = 0;
  /// 0 or an errno; a GID that is not set is ENODATA.
  virtual int query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index, ibv_gid_entry* entry) = 0;
  virtual int get_async_event(ibv_context* context, ibv_async_event* event) = 0;
  virtual void ack_async_event(ibv_async_event* event) = 0;

  // ---- memory
  virtual ibv_pd* alloc_pd(ibv_context* context) = 0;
  virtual int dealloc_pd(ibv_pd* domain) = 0;
  virtual ibv_mr* reg_mr(ibv_pd* domain, void* data, std::size_t bytes, unsigned access) = 0;
  virtual ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address, int fd,
                                int access) = 0;
  virtual int dereg_mr(ibv_mr* mr) = 0;

  // ---- completion queues
  virtual ibv_comp_channel* create_comp_channel(ibv_context* context) = 0;
  virtual int destroy_comp_channel(ibv_comp_channel* channel) = 0;
  virtual ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) = 0;
  virtual int destroy_cq(ibv_cq* queue) = 0;
  virtual int poll_cq(ibv_cq* queue, int most, ibv_wc* completions) = 0;
  virtual int req_notify_cq(ibv_cq* queue) = 0;
  virtual int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue) = 0;
  virtual void ack_cq_events(ibv_cq* queue, unsigned count) = 0;

  // ---- queue pairs
  virtual ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) = 0;
  virtual int destroy_srq(ibv_srq* queue) = 0;
  virtual int post_srq_recv(ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr** bad) = 0;
  virtual ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) = 0;
  virtual int destroy_qp(ibv_qp* pair) = 0;
  virtual int modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) = 0;
  virtual int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** bad) = 0;

  /// The connection manager of the same devices.
  virtual CmApi& cm() = 0;
};

/// The system's libibverbs.
Api& system_api();

}  // namespace kvferry::verbs
