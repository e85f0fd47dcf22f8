#include <kvferry/transports/verbs/cm_api.hpp>

namespace kvferry::verbs {
namespace {

class SystemCmApi final : public CmApi {
 public:
  rdma_event_channel* create_event_channel() override { return ::rdma_create_event_channel(); }
  void destroy_event_channel(rdma_event_channel* channel) override { ::rdma_destroy_event_channel(channel); }
  int get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) override {
    return ::rdma_get_cm_event(channel, event);
  }
  int ack_cm_event(rdma_cm_event* event) override { return ::rdma_ack_cm_event(event); }

  int create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context) override {
    return ::rdma_create_id(channel, id, context, RDMA_PS_TCP);
  }
  int destroy_id(rdma_cm_id* id) override { return ::rdma_destroy_id(id); }
  int set_option(rdma_cm_id* id, int level, int name, void* value, std::size_t bytes) override {
    return ::rdma_set_option(id, level, name, value, bytes);
  }

  int bind_addr(rdma_cm_id* id, sockaddr* address) override { return ::rdma_bind_addr(id, address); }
  int listen(rdma_cm_id* id, int backlog) override { return ::rdma_listen(id, backlog); }
  std::uint16_t get_src_port(rdma_cm_id* id) override { return ::rdma_get_src_port(id); }
  int accept(rdma_cm_id* id, rdma_conn_param* parameters) override { return ::rdma_accept(id, parameters); }
  int reject(rdma_cm_id* id, const void* data, std::uint8_t bytes) override { return ::rdma_reject(id, data, bytes); }

  int resolve_addr(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) override {
    return ::rdma_resolve_addr(id, from, to, timeout_ms);
  }
  int resolve_route(rdma_cm_id* id, int timeout_ms) override { return ::rdma_resolve_route(id, timeout_ms); }
  int connect(rdma_cm_id* id, rdma_conn_param* parameters) override { return ::rdma_connect(id, parameters); }
  int establish(rdma_cm_id* id) override { return ::rdma_establish(id); }

  int init_qp_attr(rdma_cm_id* id, ibv_qp_attr* attributes, int* mask) override {
    return ::rdma_init_qp_attr(id, attributes, mask);
  }
};

}  // namespace

CmApi& system_cm_api() {
  static SystemCmApi api;
  return api;
}

}  // namespace kvferry::verbs
