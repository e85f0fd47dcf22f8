// The transport contract: what moves bytes, and what it promises. Every transport passes the one
// suite in tests/transports/contract_test.cpp.
//
//   Transport   one per engine and kind; registration.            Any thread.
//   Port        one per Transport and poller; everything else.     Only its poller's thread.
//   Channel     a connection inside a Port to one peer, by number. Directed: the opener is the
//               initiator, the accepting side serves (where its CPU takes part at all).
//
// 1. post never blocks and says how many items it took, in order; the rest stay with the caller.
// 2. Every item taken gives exactly one completion, from poll.
// 3. After an item's completion no byte of it moves: not local memory whatever the status, and
//    remote memory neither as long as the peer can be asked.
// 4. fence(channel) ends every item and guarantees 3 for them, in bounded time.
// 5. Lengths 0, 1, odd and over 4 GiB are right; offsets are checked by the initiator's engine and
//    again by the target where the target's CPU takes part.
// 6. A channel error says which side and why; a new channel to the same peer can be opened.
// 7. Ops: read, write, write with 32-bit immediate, send. The immediate reaches the target after
//    the data is visible to it.
// 8. Registration failure is an error at registration, with the limit that was hit in its text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <kvferry/runtime/host.hpp>
#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/region_table.hpp>
#include <kvferry/runtime/slice.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

class WorkOffer;

/// Random secret that the target's engine gave the initiator's in the handshake; opens channels.
using Token = std::array<std::byte, 16>;

/// The target engine's number of a connected initiator.
using SessionId = std::uint64_t;

/// Number of a channel inside its Port; never used twice by one Port.
using ChannelId = std::uint32_t;

/// Largest message of Op::send, in bytes.
inline constexpr std::uint32_t max_message_bytes = 64 * 1024;

/// One piece of work. What it points to stays valid until its completion.
struct WorkItem {
  Op op = Op::read;                      ///< read, write, write_imm or send
  std::uint64_t cookie = 0;              ///< returned in the completion; unique among a Port's items
  const RegionRecord* local = nullptr;   ///< read, write, write_imm
  const RemoteRegion* remote = nullptr;  ///< read, write, write_imm
  SliceRange slices;                     ///< may be empty for write_imm
  std::uint32_t immediate = 0;           ///< write_imm
  std::uint64_t sequence = 0;            ///< write_imm, send: passed to the target unchanged
  std::span<const std::byte> message;    ///< send: at most max_message_bytes
  std::uint64_t transfer_bytes = 0;      ///< bytes of the whole transfer the item is cut from; 0 = just the item
  WorkOffer* waiters = nullptr;          ///< where the transfer's waiters look for work; nullptr: none can be had
};

/// The outcome of one item. channel_error means: perhaps not done, may be tried again elsewhere;
/// any other error is final.
struct Completion {
  std::uint64_t cookie = 0;
  Status status;
};

/// What happens on a Port beside completions. Implemented by the poller; called on its thread, only
/// from inside Port::poll. Implementations must not call the Port back.
class PortEvents {
 public:
  virtual ~PortEvents() = default;

  // ---- initiator's side
  virtual void on_channel_up(ChannelId channel) = 0;
  /// The channel is gone for ever; the completions of its items come from the same or later polls.
  virtual void on_channel_down(ChannelId channel, const Status& why) = 0;
  /// Carry `request` out of band to Port::serve() of the port at the channel's ChannelSpec::address, and what
  /// that returns, or why it could not be had, to Port::on_answer(). Requests of one channel keep their order.
  // Overriders keep the request. NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual void on_request(ChannelId /*channel*/, std::string /*request*/) {}

  // ---- target's side
  /// The session a token stands for, or nothing: then the connection is refused.
  virtual std::optional<SessionId> authorize(const Token& token) = 0;
  /// An immediate arrived, its data visible. False: no room, offer it again from a later poll (the
  /// item stays without completion at the initiator meanwhile).
  virtual bool on_notification(SessionId session, std::uint64_t sequence, std::uint32_t immediate) = 0;
  /// A message arrived; `bytes` are valid during the call. False as above.
  virtual bool on_message(SessionId session, std::uint64_t sequence, std::span<const std::byte> bytes) = 0;
};

/// How a Port wants its items cut.
struct PortLimits {
  std::uint64_t item_bytes = 1 << 20;    ///< most bytes of one item
  std::uint32_t item_slices = 1024;      ///< most slices of one item
  std::uint64_t whole_bytes = 64 << 10;  ///< slices up to this size are never cut
  std::uint32_t channel_items = 64;      ///< most items in flight on one channel
  /// How many items a channel carries side by side. A transfer that as many somewhat larger items can carry (up to
  /// large_item times item_bytes each) is cut into just these: fewer requests, and all end together. 0: never.
  std::uint32_t side_by_side = 0;
  static constexpr std::uint64_t large_item = 4;
};

/// What the caller's next poll would find.
enum class Progress : std::uint8_t {
  idle,     ///< nothing outstanding; wait_fd() reports what arrives
  waiting,  ///< work is outstanding and wait_fd() will report it: spin a little, then sleep
  runnable  ///< there is work for this thread right now: poll again
};

struct ChannelSpec {
  std::string address;                   ///< Port::address() of the peer's port
  std::string host;                      ///< the peer's host as this engine reached it, for wildcard addresses
  Token token{};                         ///< from the peer's handshake
  std::uint64_t target_incarnation = 0;  ///< the life of the peer that is meant
  TimePoint give_up{};                   ///< when connecting has failed
  std::uint32_t path = 0;                ///< which of several paths between the hosts; rails of a peer differ in it
};

/// One poller's share of a transport.
class Port {
 public:
  /// Ends everything at once; nothing of this Port's items moves afterwards. No completions come.
  virtual ~Port() = default;

  virtual PortLimits limits() const = 0;
  /// How peers reach this port: opaque bytes for ChannelSpec::address.
  virtual std::string address() const = 0;

  /// Begins to connect; on_channel_up or on_channel_down follows from poll by spec.give_up. An error
  /// at once means that this channel can never be (the text says why).
  virtual Result<ChannelId> open(const ChannelSpec& spec) = 0;

  /// How many bytes must wait for nearer channels before this one is worth its way to the region: 0 where the
  /// channel's device is near, or nothing is known.
  virtual std::uint64_t detour_bytes(ChannelId /*channel*/, const RegionRecord& /*local*/) const { return 0; }

  /// Hands items over; returns how many were taken, a prefix. 0 when the channel is not up.
  virtual std::size_t post(ChannelId channel, std::span<const WorkItem> items) = 0;

  /// Asks one item to end soon (its completion says cancelled, or its own outcome). What can not be
  /// stopped alone simply goes on: the caller fences the channel if that takes too long.
  virtual void cancel(ChannelId channel, std::uint64_t cookie) = 0;

  /// Ends the channel and every item on it (channel_error with `why`'s text, or the item's own
  /// outcome), each completion given once the item is quiet, all within the fence limit.
  /// on_channel_down follows. Not an error for a channel that is gone.
  virtual void fence(ChannelId channel, const Status& why) = 0;

  /// Makes progress on everything, both sides, in a bounded portion; fills completions, returns how many.
  virtual std::size_t poll(std::span<Completion> completions) = 0;

  /// Initiator's side: what became of a request that PortEvents::on_request() was given. A channel that is gone
  /// is no error.
  virtual void on_answer(ChannelId /*channel*/, const Result<std::string>& /*answer*/) {}
  /// Target's side: answers such a request. Whoever sent it proves by its token that it may.
  virtual Result<std::string> serve(std::string_view /*request*/) {
    return {Errc::malformed, "this transport connects without requests"};
  }

  virtual Progress progress() const = 0;
  /// Readable when poll has something to do (an epoll descriptor, for instance); -1 when nothing ever
  /// arrives by itself.
  virtual int wait_fd() const = 0;
  /// When poll wants to be called even if wait_fd stays silent; TimePoint::max() for never.
  virtual TimePoint next_wakeup() const = 0;

  /// Serving side: true when nothing on this port touches the (retired) region any more. With
  /// `force`, breaks what still does (connections are closed) and returns true.
  virtual bool release_region(RegionKey region, bool force) = 0;
  /// Serving side: ends all connections of a session.
  virtual void drop_session(SessionId session) = 0;
};

/// What every Port of an engine shares; outlives the Ports.
struct PortContext {
  RegionTable* regions = nullptr;  ///< this engine's regions, for serving
  std::uint64_t incarnation = 0;   ///< of this engine
  std::string listen_host;         ///< address to bind serving sockets to
  Duration fence_limit = std::chrono::milliseconds(500);
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  /// Ok when a channel to such a peer makes sense; otherwise why not.
  virtual Status reaches(const HostFacts& self, const HostFacts& peer) const = 0;
  /// True when the initiator's CPU alone moves the bytes: spinning for the end takes nothing from whoever
  /// does the work.
  virtual bool one_sided() const { return false; }
  /// How many paths join two hosts, such as network cards: an engine opens at least as many rails.
  virtual std::uint32_t paths() const { return 1; }
  /// Prepares a region; returns the descriptor that peers are given (may be empty). Any thread.
  virtual Result<std::string> register_region(const RegionRecord& region) = 0;
  /// After every Port has released it. Any thread.
  virtual void unregister_region(const RegionRecord& region) = 0;
  virtual Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) = 0;
};

}  // namespace kvferry
