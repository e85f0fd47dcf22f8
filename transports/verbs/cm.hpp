// Connecting through librdmacm: one id for each queue pair, driven by the events of one channel, none of
// which anybody waits for. The queue pairs stay ours: librdmacm only says how they reach each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/cm_api.hpp>
#include <kvferry/transports/verbs/connection.hpp>

namespace kvferry::verbs {

class CmId;

/// What librdmacm has to say about one id; the event itself has been acknowledged.
struct CmEvent {
  rdma_cm_event_type type = RDMA_CM_EVENT_ADDR_RESOLVED;
  int status = 0;  ///< a negative errno, or what a rejection gives for its reason
  std::array<std::byte, 256> data{};
  std::size_t bytes = 0;  ///< of data, which may be padded

  std::span<const std::byte> private_data() const noexcept { return {data.data(), bytes}; }
};

/// Whoever has ids.
class CmOwner {
 public:
  virtual ~CmOwner() = default;
  /// May destroy the id.
  virtual void on_cm_event(CmId& id, const CmEvent& event) = 0;
};

/// Takes the requests to connect that come in.
class CmListener : public CmOwner {
 public:
  virtual void on_cm_request(std::unique_ptr<CmId> id, const CmEvent& event) = 0;
};

/// One connection's rdma_cm_id. Destroying it at any moment gives the connection up and tells the peer; no
/// event of it comes afterwards.
class CmId {
 public:
  /// `tag` is the owner's own.
  static Result<std::unique_ptr<CmId>> create(CmApi& api, rdma_event_channel* events, CmOwner& owner,
                                              std::uint64_t tag);
  /// Takes over an id that librdmacm has made for a request.
  CmId(CmApi& api, rdma_cm_id* id, CmOwner& owner) : api_(api), id_(id), owner_(&owner) { id->context = this; }
  ~CmId();
  CmId(const CmId&) = delete;
  CmId& operator=(const CmId&) = delete;

  std::uint64_t tag() const noexcept { return tag_; }
  void set_tag(std::uint64_t tag) noexcept { tag_ = tag; }
  CmOwner& owner() const noexcept { return *owner_; }
  /// Whether the id has come to lie on this port of a device.
  bool is_on(const Device& device) const;
  /// That port, such as "mlx5_0:1".
  std::string place() const;

  // ---- in this order at the initiator; each but the last is followed by an event
  Status resolve_address(const RawGid& from, const RawGid& to, std::uint16_t port, const VerbsConfig& config,
                         TimePoint give_up);
  Status resolve_route(TimePoint give_up);
  Status connect(const QueuePair& pair, std::uint32_t reads_out, const VerbsConfig& config,
                 std::span<const std::byte> data);
  Status establish();

  // ---- at the target
  Status listen();
  std::uint16_t port() const;
  Status accept(const QueuePair& pair, std::uint32_t reads_served, std::span<const std::byte> data);
  void reject(std::span<const std::byte> data) noexcept;

  /// Completes the route by what librdmacm knows, once the peer's queue pair is known.
  Status complete(PairRoute& route) const;

 private:
  Status failed(const char* what) const;

  CmApi& api_;
  rdma_cm_id* id_ = nullptr;
  CmOwner* owner_ = nullptr;
  std::uint64_t tag_ = 0;
};

/// A port's share of librdmacm: its event channel and the id that listens.
class CmEvents {
 public:
  static Result<std::unique_ptr<CmEvents>> create(const Device& device, CmListener& listener);
  ~CmEvents();
  CmEvents(const CmEvents&) = delete;
  CmEvents& operator=(const CmEvents&) = delete;

  Result<std::unique_ptr<CmId>> new_id(CmOwner& owner, std::uint64_t tag) {
    return CmId::create(api_, channel_, owner, tag);
  }
  /// Where peers connect to, on the address of any device.
  std::uint16_t port() const { return listening_->port(); }
  int event_fd() const noexcept { return channel_->fd; }
  /// Hands over what has happened, a bounded portion; returns whether there was something.
  bool poll();

 private:
  CmEvents(CmApi& api, CmListener& listener) : api_(api), listener_(listener) {}
  Status start();
  void hand_over(rdma_cm_event& event);

  CmApi& api_;
  CmListener& listener_;
  rdma_event_channel* channel_ = nullptr;
  std::unique_ptr<CmId> listening_;
};

/// What an event that ends a connection means, for the side that asked for it. `peer` is the address asked.
Status describe_end(const CmEvent& event, const std::string& ours, const std::string& peer);

/// Whether a connection is over with this event; the others that are not expected mean nothing to us.
bool ends_connection(rdma_cm_event_type type) noexcept;

}  // namespace kvferry::verbs
