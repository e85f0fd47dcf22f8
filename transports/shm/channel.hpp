// The initiator's side of one connection: it does all the copying.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <kvferry/transports/shm/control_page.hpp>
#include <kvferry/transports/shm/item.hpp>
#include <kvferry/transports/shm/peer_memory.hpp>
#include <kvferry/transports/shm/port_parts.hpp>
#include <kvferry/transports/shm/protocol.hpp>
#include <kvferry/transports/shm/unix_socket.hpp>

namespace kvferry::shm {

/// A region of the peer as this channel reaches it.
struct Mapping {
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  RegionKey key;
  std::uint64_t size = 0;     ///< bytes
  std::byte* base = nullptr;  ///< mapped here, or for foreign memory nullptr
  std::uint64_t address = 0;  ///< in the peer, for foreign memory
  Access access = Access::none;
  bool foreign = false;
  bool ready = false;       ///< the target has given it
  bool gone = false;        ///< the target has taken it back
  std::uint32_t users = 0;  ///< items that have been started on it
  ItemQueue parked;         ///< items that wait for `ready`
};

class Channel {
 public:
  Channel(ChannelId id, const ChannelSpec& spec, PortParts& parts);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// First attempt to connect. An error means that there will be none that succeeds.
  Status connect();
  std::size_t post(std::span<const WorkItem> items);
  void cancel(std::uint64_t cookie);
  /// Ends the channel and its items. Only helpers may still be inside a portion afterwards; once
  /// they are out ended() is true.
  void fail(const Status& why);
  /// Before destruction at any moment: helpers stop at the end of their portions.
  void stop_helpers() noexcept { stop_.store(true); }

  ChannelId id() const noexcept { return id_; }
  const Status& why() const noexcept { return why_; }
  bool ended() const noexcept { return state_ == State::ended; }
  bool has_work() const noexcept { return !ready_.empty(); }
  /// Set while the channel stands in PortParts::active.
  bool active = false;

  // ---- from Port::poll
  /// Carries the foremost ready item on by a portion of at most `budget` bytes; returns its cost in bytes.
  std::uint64_t run(std::uint64_t budget);
  void on_socket(std::uint32_t events);
  void on_process_end();
  void on_helper_done(Item* item);
  void tick(TimePoint now);
  bool connecting() const noexcept { return state_ == State::connecting || state_ == State::greeting; }
  TimePoint next_wakeup(TimePoint now) const;

  /// Takes the offer of an item in PortParts::shared back; then on_helper_done() may have it. False: a waiter
  /// still copies for it.
  static bool end_sharing(Item& item);

  /// Helper thread: copies all that is left of an item that is in State::helper.
  Status copy_whole(Item& item) const;
  /// Any thread, through SharedCopy: copies a part of an item that is being shared.
  Status copy_share(const Item& item, SliceRange share) const;

 private:
  enum class State : std::uint8_t { connecting, greeting, up, ending, ended };

  // ---- set-up
  Status greet(Fd socket);
  Status on_welcome(const WelcomePacket& packet, Fd page);

  // ---- packets
  Status on_packet(std::span<const std::byte> packet, Fd passed);
  Status on_region(const RegionReplyPacket& packet, Fd memfd);
  Status on_region_gone(const RegionGonePacket& packet);
  Status on_ack(const AckPacket& packet);
  void flush();
  bool flush_requests();
  IoResult send_item(const Item& item) const;
  void wait_for_room(bool wanted);

  // ---- regions
  Mapping& mapping_of(RegionKey key);
  Status map(Mapping& mapping, const RegionReplyPacket& packet, const Fd& memfd);
  void drop_if_unused(Mapping& mapping);

  // ---- items
  bool prepare(Item& item);
  Status check_operation(const Item& item) const;
  Status check_reach(const Item& item) const;
  void copied(Item& item);
  void make_ready(Item* item);
  void finish(Item& item, Status status);
  void fail_queue(ItemQueue& queue);
  bool may_share(const WorkItem& work) const;
  void share(Item& item);
  std::uint64_t run_shared(Item& item, std::uint64_t budget);
  void await_waiters(Item& item, Status why);
  Status copy_portion(const Item& item, SliceRange& left, std::uint64_t budget) const;
  Status copy_foreign(const Item& item, SliceRange& left, std::uint64_t budget) const;
  void copy_mapped(const Item& item, SliceRange& left, std::uint64_t budget) const;
  void close_up();

  const ChannelId id_;
  const ChannelSpec spec_;
  PortParts& parts_;
  State state_ = State::connecting;
  Status why_;
  Fd socket_;
  bool room_wanted_ = false;
  ControlPage page_;
  PeerMemory peer_;
  std::atomic<bool> stop_{false};
  std::uint32_t in_helpers_ = 0;
  std::uint64_t next_number_ = 1;

  std::array<Item, max_unacknowledged> items_;
  ItemQueue unused_;
  ItemQueue ready_;
  ItemQueue sending_;
  ItemQueue sent_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Mapping>> mappings_;  ///< by slot and generation
  std::vector<RegionKey> unasked_;                                        ///< region requests that found no room
};

}  // namespace kvferry::shm
