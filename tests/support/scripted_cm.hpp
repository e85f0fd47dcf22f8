// A connection manager in memory for the devices of a ScriptedNic: finds a device by its GID's address,
// carries private data, and fails where it is told to. Stands behind verbs::CmApi.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <kvferry/transports/verbs/cm_api.hpp>

namespace kvferry::test {

/// Where ids can lie.
struct CmPlace {
  ibv_device* device = nullptr;
  std::uint8_t port = 1;
  std::vector<ibv_gid> addresses;
};

class ScriptedCm final : public verbs::CmApi {
 public:
  explicit ScriptedCm(std::vector<CmPlace> places);
  ~ScriptedCm() override;

  // ---- what goes wrong, from now on; all may be called at any time
  /// Addresses are not resolved: the event has this errno. 0 ends it.
  void fail_addresses(int error);
  void fail_routes(int error);
  /// Requests to connect are lost.
  void lose_requests(bool lost);
  /// Requests to connect are rejected with this reason, whoever listens; 0 ends it.
  void reject_requests(int reason);
  /// The next accept fails with this errno.
  void fail_accept(int error);
  /// Every connection of the device ends, as when it is removed.
  void remove_device(const std::string& device);

  struct Counts {
    std::size_t ids = 0;
    std::size_t channels = 0;
    std::uint64_t connected = 0;  ///< ever
  };
  Counts counts() const;
  std::vector<std::string> broken_rules() const;

  // ---- verbs::CmApi
  rdma_event_channel* create_event_channel() override;
  void destroy_event_channel(rdma_event_channel* channel) override;
  int get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) override;
  int ack_cm_event(rdma_cm_event* event) override;
  int create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context) override;
  int destroy_id(rdma_cm_id* id) override;
  int set_option(rdma_cm_id* id, int level, int name, void* value, std::size_t bytes) override;
  int bind_addr(rdma_cm_id* id, sockaddr* address) override;
  int listen(rdma_cm_id* id, int backlog) override;
  std::uint16_t get_src_port(rdma_cm_id* id) override;
  int accept(rdma_cm_id* id, rdma_conn_param* parameters) override;
  int reject(rdma_cm_id* id, const void* data, std::uint8_t bytes) override;
  int resolve_addr(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) override;
  int resolve_route(rdma_cm_id* id, int timeout_ms) override;
  int connect(rdma_cm_id* id, rdma_conn_param* parameters) override;
  int establish(rdma_cm_id* id) override;
  int init_qp_attr(rdma_cm_id* id, ibv_qp_attr* attributes, int* mask) override;

 private:
  struct Id;
  struct Event;
  struct Channel;
  enum class State : std::uint8_t {
    idle,
    bound,
    listening,
    addressed,
    routed,
    calling,
    called,
    answered,
    connected,
    over
  };

  void tell(Id& id, rdma_cm_event_type type, int status = 0, const std::vector<std::byte>& data = {});
  void end(Id& id, rdma_cm_event_type type, int status = 0, const std::vector<std::byte>& data = {});
  void forget(Id& id);
  void place(Id& id, const CmPlace& at);
  const CmPlace* find_place(const sockaddr* address) const;
  void breaks(std::string rule) { broken_.push_back(std::move(rule)); }
  int wrong_state(const char* call);

  mutable std::mutex mutex_;
  std::vector<CmPlace> places_;
  std::vector<std::unique_ptr<ibv_context>> contexts_;  ///< librdmacm opens devices for itself
  std::set<Id*> ids_;
  std::uint16_t next_port_ = 20000;
  std::uint32_t next_psn_ = 7;
  int address_error_ = 0;
  int route_error_ = 0;
  int accept_error_ = 0;
  int reject_reason_ = 0;
  bool lost_ = false;
  Counts counts_;
  std::vector<std::string> broken_;
};

}  // namespace kvferry::test
