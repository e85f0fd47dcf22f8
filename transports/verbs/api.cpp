#include <kvferry/transports/verbs/api.hpp>

namespace kvferry::verbs {
namespace {

class SystemApi final : public Api {
 public:
  ibv_device** get_device_list(int* count) override { return ::ibv_get_device_list(count); }
  void free_device_list(ibv_device** list) override { ::ibv_free_device_list(list); }
  const char* get_device_name(ibv_device* device) override { return ::ibv_get_device_name(device); }
  ibv_context* open_device(ibv_device* device) override { return ::ibv_open_device(device); }
  int close_device(ibv_context* context) override { return ::ibv_close_device(context); }
  int query_device(ibv_context* context, ibv_device_attr* attributes) override {
    return ::ibv_query_device(context, attributes);
  }
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) override {
    return ibv_query_port(context, port, attributes);
  }
  int query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index, ibv_gid_entry* entry) override {
    return ibv_query_gid_ex(context, port, index, entry, 0);
  }
  int get_async_event(ibv_context* context, ibv_async_event* event) override {
    return ::ibv_get_async_event(context, event);
  }
  void ack_async_event(ibv_async_event* event) override { ::ibv_ack_async_event(event); }

  ibv_pd* alloc_pd(ibv_context* context) override { return ::ibv_alloc_pd(context); }
  int dealloc_pd(ibv_pd* domain) override { return ::ibv_dealloc_pd(domain); }
  ibv_mr* reg_mr(ibv_pd* domain, void* data, std::size_t bytes, unsigned access) override {
    return ibv_reg_mr(domain, data, bytes, access);
  }
  ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address, int fd,
                        int access) override {
    return ::ibv_reg_dmabuf_mr(domain, offset, bytes, address, fd, access);
  }
  int dereg_mr(ibv_mr* mr) override { return ::ibv_dereg_mr(mr); }

  ibv_comp_channel* create_comp_channel(ibv_context* context) override { return ::ibv_create_comp_channel(context); }
  int destroy_comp_channel(ibv_comp_channel* channel) override { return ::ibv_destroy_comp_channel(channel); }
  ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) override {
    return ::ibv_create_cq(context, entries, nullptr, channel, 0);
  }
  int destroy_cq(ibv_cq* queue) override { return ::ibv_destroy_cq(queue); }
  int poll_cq(ibv_cq* queue, int most, ibv_wc* completions) override { return ::ibv_poll_cq(queue, most, completions); }
  int req_notify_cq(ibv_cq* queue) override { return ::ibv_req_notify_cq(queue, 0); }
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue) override {
    void* context = nullptr;
    return ::ibv_get_cq_event(channel, queue, &context);
  }
  void ack_cq_events(ibv_cq* queue, unsigned count) override { ::ibv_ack_cq_events(queue, count); }

  ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) override {
    return ::ibv_create_srq(domain, attributes);
  }
  int destroy_srq(ibv_srq* queue) override { return ::ibv_destroy_srq(queue); }
  int post_srq_recv(ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr** bad) override {
    return ::ibv_post_srq_recv(queue, request, bad);
  }
  ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) override {
    return ::ibv_create_qp(domain, attributes);
  }
  int destroy_qp(ibv_qp* pair) override { return ::ibv_destroy_qp(pair); }
  int modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) override {
    return ::ibv_modify_qp(pair, attributes, mask);
  }
  int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** bad) override {
    return ::ibv_post_send(pair, request, bad);
  }
  CmApi& cm() override { return system_cm_api(); }
};

}  // namespace

Api& system_api() {
  static SystemApi api;
  return api;
}

}  // namespace kvferry::verbs
