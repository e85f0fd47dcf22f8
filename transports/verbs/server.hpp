// The target's side of channels: queue pairs that initiators read and write through, and what they sent
// that the engine has not taken yet.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/cm_wire.hpp>
#include <kvferry/transports/verbs/port_parts.hpp>
#include <kvferry/transports/verbs/wire.hpp>

namespace kvferry::verbs {

/// Notifications and messages that one channel may have under way: as many as the engine can take at once,
/// and few enough that the shared buffers serve dozens of channels.
inline constexpr std::uint32_t notification_credits = 32;
inline constexpr std::uint32_t message_credits = 8;

/// One channel of an initiator.
class Served final : public PairOwner {
 public:
  Served(SessionId session, std::uint64_t wire_id, PortParts& parts)
      : session_(session), wire_id_(wire_id), parts_(parts) {}
  ~Served() override;

  /// Makes the queue pairs that the request asks for, none of them connected.
  Status prepare(const ConnectRequest& request);
  /// Connects all of them as the request says.
  Result<ConnectAnswer> connect(const ConnectRequest& request);
  /// Connects one of them with the caller's. The id stays the caller's after an error.
  Status accept(std::unique_ptr<CmId>& id, std::uint32_t index);
  bool called() const noexcept { return !cm_ids_.empty(); }
  void on_established() noexcept { ++established_; }
  /// Queue pairs that librdmacm has yet to report established.
  std::size_t half_open() const noexcept { return cm_ids_.size() - established_; }
  /// A message or notification has arrived in a buffer of `from`. It goes back when the engine has it.
  void on_arrival(ReceiveQueue& from, std::uint32_t buffer, const Head& head);
  void on_sent(SendQueue& queue, const ibv_wc& completion) override;
  /// Offers the engine what waits, and tells the initiator what has been taken.
  void tick();

  SessionId session() const noexcept { return session_; }
  bool stalled() const noexcept { return !notifications_.empty() || !messages_.empty(); }
  bool busy() const noexcept { return stalled() || !taken_.empty(); }
  bool runnable() const noexcept { return !taken_.empty() && !reporting_ && !broken_; }
  const DeviceSide* side() const noexcept { return side_; }

 private:
  struct Arrival {
    ReceiveQueue* from = nullptr;
    std::uint32_t buffer = 0;
    Head head;
  };
  bool offer(const Arrival& arrival);
  void offer_all(std::deque<Arrival>& waiting);
  void report();

  const SessionId session_;
  const std::uint64_t wire_id_;
  PortParts& parts_;
  DeviceSide* side_ = nullptr;
  PairRoute route_;
  std::vector<std::unique_ptr<SendQueue>> pairs_;
  std::unordered_map<std::uint32_t, std::unique_ptr<CmId>> cm_ids_;  ///< by place of the queue pair
  std::size_t established_ = 0;
  std::uint32_t reserved_ = 0;
  std::deque<Arrival> notifications_;
  std::deque<Arrival> messages_;
  std::deque<std::uint32_t> taken_;  ///< numbers that the initiator is to be told
  bool reporting_ = false;           ///< a report is under way
  bool broken_ = false;
};

class Server final : public CmListener {
 public:
  explicit Server(PortParts& parts) : parts_(parts) {}

  Result<std::string> serve(std::string_view request);
  /// Something for one of the channels has arrived in a buffer of `from`.
  void on_arrival(ReceiveQueue& from, std::uint32_t buffer, const Head& head);
  void on_cm_request(std::unique_ptr<CmId> id, const CmEvent& event) override;
  void on_cm_event(CmId& id, const CmEvent& event) override;
  void drop_session(SessionId session);
  void tick();
  bool stalled() const;
  bool runnable() const;
  /// Events of librdmacm are soon to come.
  bool connecting() const noexcept { return half_open_ > 0; }

 private:
  Result<Served*> admit(const ConnectRequest& request);
  Status accept(std::unique_ptr<CmId>& id, const CmEvent& event);
  Result<Served*> served_by(const CmId& id, const CmCall& call);
  void remove(std::uint64_t wire_id);

  PortParts& parts_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Served>> channels_;
  std::size_t half_open_ = 0;  ///< of all channels
  std::vector<Served*> busy_;  ///< those that have something to do without an arrival
};

}  // namespace kvferry::verbs
