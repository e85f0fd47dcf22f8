// RDMA devices in memory: moves real bytes between the queue pairs of one process, keeps the rules that a
// real device keeps, and fails where it is told to. Stands behind verbs::Api.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <kvferry/transports/verbs/api.hpp>

#include "tests/support/nic_timer.hpp"
#include "tests/support/scripted_cm.hpp"

namespace kvferry::test {

/// How a device looks. Ports are numbered from 1.
struct NicPort {
  ibv_port_state state = IBV_PORT_ACTIVE;
  bool ethernet = true;
  ibv_mtu mtu = IBV_MTU_4096;
  std::uint16_t lid = 0;
  std::vector<ibv_gid_entry> gids;
  std::uint32_t max_message = 1u << 30;
};
struct NicDevice {
  std::string name;
  std::vector<NicPort> ports = {NicPort{}};
  int max_qp_wr = 16384;
  int max_sge = 30;
  int max_cqe = 1 << 20;
  int max_srq_wr = 16384;
  int max_reads = 16;
  std::uint32_t max_inline = 256;
  std::uint64_t max_mr_bytes = ~std::uint64_t{0};
  bool dmabuf = false;                              ///< registers GPU memory by dma-buf handles
  bool peermem = false;                             ///< registers it plainly, as with nvidia-peermem
  std::uint64_t memlock_bytes = ~std::uint64_t{0};  ///< registering more fails as RLIMIT_MEMLOCK does
};

/// An RoCE v2 entry with the loopback address, which every host has.
ibv_gid_entry loopback_gid(std::uint32_t index = 1);

class ScriptedNic final : public verbs::Api {
 public:
  explicit ScriptedNic(std::vector<NicDevice> devices);
  ~ScriptedNic() override;

  // ---- what goes wrong; all may be called at any time
  /// The request number `nth` from now (0 is the next) is refused with `error`, once.
  void refuse_post(std::uint64_t nth, int error);
  /// Every post is refused with `error` from now on; 0 ends it.
  void refuse_all_posts(int error);
  /// The request number `nth` from now ends with `status` instead of moving its bytes.
  void fail_request(std::uint64_t nth, ibv_wc_status status);
  /// Requests stay in flight until this is called with false.
  void hold_requests(bool held);
  /// Flushing takes until this is called with false: a device that hangs.
  void hang(bool hung);
  /// The port goes down or comes up again, with the event that tells of it.
  void set_port(const std::string& device, std::uint8_t port, ibv_port_state state);
  void lose_device(const std::string& device);
  /// Every memory region of this key loses its rights, as if its owner had deregistered it.
  void forget_remote_keys();

  /// Declares memory as a GPU's, which host functions can not register; returns its dma-buf handle.
  int add_gpu_memory(void* data, std::size_t bytes);

  // ---- how long things take; to be chosen before anything is posted
  /// Reads and writes end when they are posted, without a look at the memory and without moving a byte: what is left is
  /// the cost of whoever posts.
  void complete_at_once() { at_once_ = true; }
  /// Requests take their time, and only advance() makes it pass, also for verbs::Api::now().
  void keep_time(const NicSpeed& speed);
  void advance(std::chrono::nanoseconds by);
  /// Without: what a request names is checked, but its bytes stay where they are.
  void move_bytes(bool moves) { moves_ = moves; }

  // ---- what has been seen
  struct Counts {
    std::uint64_t doorbells = 0;
    std::uint64_t requests = 0;
    std::uint64_t signalled = 0;
    std::uint64_t bytes = 0;      ///< of reads and writes that ended well
    std::uint64_t not_ready = 0;  ///< looks at a request whose receiver had no buffer
    std::size_t pairs = 0;        ///< alive, as all below
    std::size_t regions = 0;
    std::size_t queues = 0;
    std::size_t receive_queues = 0;
    std::size_t channels = 0;
    std::size_t contexts = 0;
    std::size_t domains = 0;
  };
  Counts counts() const;
  /// Requests that were posted to queue pairs of the device.
  std::uint64_t requests_of(const std::string& device) const;
  /// Rules that were broken, such as a queue that overflowed; empty when all went well.
  std::vector<std::string> broken_rules() const;

  // ---- verbs::Api
  TimePoint now() const override;
  ibv_device** get_device_list(int* count) override;
  void free_device_list(ibv_device** list) override;
  const char* get_device_name(ibv_device* device) override;
  ibv_context* open_device(ibv_device* device) override;
  int close_device(ibv_context* context) override;
  int query_device(ibv_context* context, ibv_device_attr* attributes) override;
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) override;
  int query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index, ibv_gid_entry* entry) override;
  int get_async_event(ibv_context* context, ibv_async_event* event) override;
  void ack_async_event(ibv_async_event* event) override;
  ibv_pd* alloc_pd(ibv_context* context) override;
  int dealloc_pd(ibv_pd* domain) override;
  ibv_mr* reg_mr(ibv_pd* domain, void* data, std::size_t bytes, unsigned access) override;
  ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address, int fd,
                        int access) override;
  int dereg_mr(ibv_mr* mr) override;
  ibv_comp_channel* create_comp_channel(ibv_context* context) override;
  int destroy_comp_channel(ibv_comp_channel* channel) override;
  ibv_cq* create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) override;
  int destroy_cq(ibv_cq* queue) override;
  int poll_cq(ibv_cq* queue, int most, ibv_wc* completions) override;
  int req_notify_cq(ibv_cq* queue) override;
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue) override;
  void ack_cq_events(ibv_cq* queue, unsigned count) override;
  ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) override;
  int destroy_srq(ibv_srq* queue) override;
  int post_srq_recv(ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr** bad) override;
  ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) override;
  int destroy_qp(ibv_qp* pair) override;
  int modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) override;
  int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** bad) override;
  ScriptedCm& cm() override { return *cm_; }

 private:
  struct Device;
  struct Context;
  struct Region;
  struct Events;
  struct Queue;
  struct Receives;
  struct Pair;
  struct Request;

  void run();
  bool run_one(Pair& pair);
  ibv_wc_status carry_out(Pair& pair, Request& request, bool& wait);
  ibv_wc_status move(const Pair& pair, const Pair& peer, Request& request);
  ibv_wc_status deliver(Pair& peer, const Request& request, bool& wait);
  void end(Pair& pair, Request& request, ibv_wc_status status);
  void flush(Pair& pair);
  void complete(Queue& queue, const ibv_wc& completion);
  ibv_mr* add_region(ibv_pd* domain, void* data, std::size_t bytes, unsigned access);
  const Region* find_region(const ibv_pd* domain, std::uint32_t key) const;
  void breaks(std::string rule);
  std::optional<int> refusal(const Pair& pair, const ibv_send_wr& request);
  int post_at_once(Pair& pair, ibv_send_wr* request, ibv_send_wr** bad);
  const Pair* peer_of(const Pair& pair) const;
  bool has_come_back(const Pair& pair);
  void note_time(const Pair& pair, const ibv_send_wr& request);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::map<std::uint32_t, Pair*> pairs_;
  std::map<std::uint32_t, Region*> regions_;  ///< by key
  std::set<Context*> contexts_;
  std::uint32_t next_number_ = 100;
  std::uint32_t next_key_ = 1000;
  std::map<std::uint64_t, int> refusals_;            ///< by number of the request
  std::map<std::uint64_t, ibv_wc_status> failures_;  ///< by number of the request
  std::uint64_t posted_ = 0;
  int refuse_all_ = 0;
  bool held_ = false;
  bool hung_ = false;
  bool at_once_ = false;
  bool moves_ = true;
  std::vector<std::pair<std::byte*, std::size_t>> gpu_memory_;  ///< by handle, from first_dmabuf
  std::unique_ptr<NicTimer> timer_;
  TimePoint epoch_{};  ///< when the timer's clock began
  Counts counts_;
  std::vector<std::string> broken_;
  std::unique_ptr<ScriptedCm> cm_;
};

}  // namespace kvferry::test
