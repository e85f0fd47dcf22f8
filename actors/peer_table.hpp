// Everything an engine knows of its peers; shared by callers, actors and pollers.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <kvferry/actors/inbox.hpp>
#include <kvferry/runtime/messages.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

inline constexpr std::size_t max_groups = 16;

/// Where transfers to a peer may go; immutable, swapped whole by the scheduler.
struct Route {
  std::vector<std::uint32_t> groups;  ///< poller numbers with a rail that is up
  std::string text;                   ///< for people: "shm, tcp"
};

enum class PeerState : std::uint8_t {
  inbound,     ///< it connected to us; we have no rails to it
  connecting,  ///< handshake done, rails not up yet
  up,
  suspect,  ///< no rail is up; the endpoint asks whether it lives
  lost,
  stale,  ///< another life of it was seen
  closed  ///< disconnected by us, or it said bye
};

/// One engine in one of its lives. Public fields are fixed; the rest is thread-safe.
struct PeerRecord {
  PeerRecord(std::uint32_t slot_number, std::uint64_t owner, std::string peer_name, std::uint64_t life)
      : slot(slot_number), owner_incarnation(owner), name(std::move(peer_name)), incarnation(life) {}

  const std::uint32_t slot;               ///< number of this peer in this engine, never used again
  const std::uint64_t owner_incarnation;  ///< the engine that holds this record
  const std::string name;
  const std::uint64_t incarnation;

  std::atomic<PeerState> state{PeerState::inbound};
  /// The initiator's CPU alone carries transfers out (Transport::one_sided): waiting may spin longer.
  std::atomic<bool> one_sided{false};
  /// Bytes handed to each group and not yet ended: callers pick the emptiest.
  std::array<std::atomic<std::uint64_t>, max_groups> backlog{};
  std::atomic<std::uint64_t> next_message{1};
  MessageBox messages;

  void set_state(PeerState next, Status reason = {});
  Status reason() const;
  std::string address() const;
  void set_address(std::string address);
  std::shared_ptr<const Route> route() const;
  void set_route(std::shared_ptr<const Route> route);

  std::shared_ptr<const RemoteRegion> find_region(std::string_view name) const;
  void set_region(RemoteRegion region);
  /// Forgets a region, but only that registration of it.
  void forget_region(const std::string& name, RegionKey key);

  /// True exactly once for each number (of each initiating group).
  bool accept_notification(std::uint64_t sequence, NotificationQueue& queue, std::uint32_t immediate);

  /// "up over shm, tcp", "lost: ...".
  std::string describe() const;
  /// The status with which work for this peer is refused in its present state.
  Status refusal() const;

 private:
  mutable std::mutex mutex_;
  Status reason_;
  std::string address_;
  std::shared_ptr<const Route> route_;
  std::map<std::string, std::shared_ptr<const RemoteRegion>, std::less<>> regions_;
  std::map<std::uint64_t, SequenceWindow> windows_;
};

/// All records of one engine, by slot, incarnation and token.
class PeerTable {
 public:
  explicit PeerTable(std::uint64_t own_incarnation) : own_(own_incarnation) {}

  /// The record of this life, made when it is new.
  std::shared_ptr<PeerRecord> find_or_add(const std::string& name, std::uint64_t incarnation);
  std::shared_ptr<PeerRecord> find_life(std::uint64_t incarnation) const;
  std::shared_ptr<PeerRecord> find_slot(std::uint32_t slot) const;

  /// A session lets the peer open channels to us; opening it again renews it and keeps its token.
  Token open_session(const std::shared_ptr<PeerRecord>& peer, TimePoint now);
  /// Notes a sign of life; false when there is no such session.
  bool touch_session(std::uint64_t incarnation, TimePoint now);
  /// False when there was none.
  bool close_session(std::uint64_t incarnation);
  /// Sessions silent since before `limit`.
  std::vector<std::shared_ptr<PeerRecord>> silent_sessions(TimePoint limit) const;
  std::optional<SessionId> authorize(const Token& token) const;

  /// The newest connected initiator of that name; waits for one.
  std::shared_ptr<PeerRecord> wait_for_session(const std::string& name, Duration limit) const;
  std::vector<std::shared_ptr<PeerRecord>> all() const;
  /// Drops the record once neither side holds a connection; handles of users stay valid.
  void remove(std::uint32_t slot);
  void close();

 private:
  struct Session {
    std::shared_ptr<PeerRecord> peer;
    Token token;
    TimePoint seen;
    std::uint64_t order;
  };
  struct TokenHash {
    std::size_t operator()(const Token& token) const noexcept;
  };

  const std::uint64_t own_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool closed_ = false;
  std::uint32_t next_slot_ = 1;
  std::uint64_t next_order_ = 1;
  /// Where a new record numbers its messages from: the peer may remember what a former record sent it.
  std::uint64_t first_message_ = 1;
  std::unordered_map<std::uint32_t, std::shared_ptr<PeerRecord>> by_slot_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PeerRecord>> by_life_;
  std::unordered_map<std::uint64_t, Session> sessions_;
  std::unordered_map<Token, SessionId, TokenHash> tokens_;
};

/// 64 or 128 random bits from the kernel.
std::uint64_t random_u64();
Token random_token();

}  // namespace kvferry
