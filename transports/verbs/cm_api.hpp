// The librdmacm functions that kvferry calls, as one table, like those of libibverbs in api.hpp: the only
// header of the library that includes rdma_cma.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include <rdma/rdma_cma.h>

namespace kvferry::verbs {

/// Every function means what its manual page says of rdma_<name>: -1 with errno for an error.
class CmApi {
 public:
  virtual ~CmApi() = default;

  virtual rdma_event_channel* create_event_channel() = 0;
  virtual void destroy_event_channel(rdma_event_channel* channel) = 0;
  virtual int get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) = 0;
  virtual int ack_cm_event(rdma_cm_event* event) = 0;

  /// Of the port space of reliable connections.
  virtual int create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context) = 0;
  virtual int destroy_id(rdma_cm_id* id) = 0;
  virtual int set_option(rdma_cm_id* id, int level, int name, void* value, std::size_t bytes) = 0;

  // ---- passive side
  virtual int bind_addr(rdma_cm_id* id, sockaddr* address) = 0;
  virtual int listen(rdma_cm_id* id, int backlog) = 0;
  /// In network byte order.
  virtual std::uint16_t get_src_port(rdma_cm_id* id) = 0;
  virtual int accept(rdma_cm_id* id, rdma_conn_param* parameters) = 0;
  virtual int reject(rdma_cm_id* id, const void* data, std::uint8_t bytes) = 0;

  // ---- active side
  virtual int resolve_addr(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) = 0;
  virtual int resolve_route(rdma_cm_id* id, int timeout_ms) = 0;
  virtual int connect(rdma_cm_id* id, rdma_conn_param* parameters) = 0;
  virtual int establish(rdma_cm_id* id) = 0;

  /// What the queue pair needs for the state that `attributes` names.
  virtual int init_qp_attr(rdma_cm_id* id, ibv_qp_attr* attributes, int* mask) = 0;
};

/// The system's librdmacm.
CmApi& system_cm_api();

}  // namespace kvferry::verbs
