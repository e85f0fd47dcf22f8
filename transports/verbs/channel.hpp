// A channel as its initiator sees it: queue pairs, the items on them, and its end.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/item.hpp>
#include <kvferry/transports/verbs/port_parts.hpp>
#include <kvferry/transports/verbs/wire.hpp>

namespace kvferry::verbs {

inline constexpr std::uint32_t most_channel_items = 64;

class Channel final : public PairOwner, public CmOwner {
 public:
  Channel(ChannelId id, const ChannelSpec& spec, PortParts& parts);
  ~Channel() override;

  /// Chooses the two devices, makes queue pairs and asks the target to connect them. An error is final.
  Status ask();
  /// The target's answer to that, or to the request to close.
  void on_answer(const Result<std::string>& answer);

  std::size_t post(std::span<const WorkItem> items);
  void cancel(std::uint64_t cookie);
  /// Begins the end: nothing new is posted, everything in flight is flushed.
  void begin_end(const Status& why);

  /// Posts what there is room for.
  void pump();
  void tick(TimePoint now);
  /// Finds out whether the target still exists while nothing but its answer is missing.
  void probe();
  TimePoint next_wakeup() const noexcept;

  void on_sent(SendQueue& queue, const ibv_wc& completion) override;
  void on_cm_event(CmId& id, const CmEvent& event) override;
  /// The target's engine has taken what had this number.
  void on_accepted(std::uint32_t number);

  ChannelId id() const noexcept { return id_; }
  std::uint64_t wire_id() const noexcept { return wire_id_; }
  const DeviceSide& side() const noexcept { return *side_; }
  bool awaits_acceptance() const noexcept { return state_ == State::up && !unaccepted_.empty(); }
  bool up() const noexcept { return state_ == State::up; }
  bool ended() const noexcept { return state_ == State::ended; }
  const Status& why() const noexcept { return why_; }
  bool has_items() const noexcept { return free_.size() < items_.size(); }
  /// Has something that needs no event to go on.
  bool runnable() const noexcept { return blocked_; }

  bool listed_busy = false;  ///< the port's own note

 private:
  enum class State : std::uint8_t { asking, proving, up, ending, ended };

  struct DataQueue {
    std::unique_ptr<SendQueue> sends;
    std::vector<Item*> items;  ///< not yet posted as a whole; a deque would allocate for every 64th
    std::uint64_t bytes = 0;   ///< of items that are not finished
  };

  // ---- connecting
  Status choose(const PortAddress& target);
  Status make_pairs();
  Status connect(const ConnectAnswer& answer);
  void begin_proof();
  Status prove();
  SendQueue& pair_at(std::size_t index) { return index < data_.size() ? *data_[index].sends : *messages_; }

  // ---- connecting through librdmacm
  Status ask_cm(const PortAddress& target);
  Status resolve(CmId& id);
  Status go_on(CmId& id, const CmEvent& event);
  std::string cm_peer() const;
  Status call(CmId& id);
  Status join(CmId& id, const CmEvent& event);
  static bool post_empty(SendQueue& sends);

  // ---- posting
  Status prepare(Item& item);
  DataQueue& least_loaded();
  void pump_data(DataQueue& queue);
  void chain_item(DataQueue& queue, Item& item);
  void add_request(SendQueue& sends, Item& item, SliceRange& left);
  void on_refused(DataQueue& queue, int error);
  void leave_posted(DataQueue& queue);
  void drain_prefix(Item& item);
  void announce();
  bool announce(Item& item);

  // ---- ending
  void settle(Item& item);
  void finish(Item& item, Status status);
  void withdraw(Item& item);
  void end_if_quiet(TimePoint now);
  void end_items();
  bool quiet() const noexcept;
  void break_pairs();
  Status describe(const ibv_wc& completion) const;

  const ChannelId id_;
  const ChannelSpec spec_;
  PortParts& parts_;
  State state_ = State::asking;
  std::uint64_t wire_id_ = 0;
  DeviceSide* side_ = nullptr;
  std::string peer_device_;
  std::uint32_t peer_index_ = 0;
  ConnectRequest request_;
  PairRoute route_;
  std::vector<std::unique_ptr<CmId>> cm_ids_;  ///< of the queue pairs, in their order
  std::uint16_t cm_port_ = 0;                  ///< of the target
  std::size_t joined_ = 0;                     ///< of the queue pairs, through librdmacm
  std::vector<DataQueue> data_;
  std::unique_ptr<SendQueue> messages_;
  std::uint32_t reserved_ = 0;  ///< entries of the completion queue

  std::vector<Item> items_;
  std::vector<Item*> free_;
  std::vector<SliceRange> after_;    ///< what each chained request leaves of its item
  std::deque<Item*> notifications_;  ///< wait to be announced
  std::deque<Item*> texts_;          ///< messages that do
  std::unordered_map<std::uint32_t, Item*> unaccepted_;
  std::unordered_map<std::uint64_t, std::vector<RegionKeys>> remote_keys_;  ///< by slot and generation
  std::uint32_t notification_credits_ = 0;
  std::uint32_t message_credits_ = 0;
  std::uint32_t next_number_ = 1;
  TimePoint probe_at_{};
  bool blocked_ = false;  ///< the device had no room for what is next

  Status why_;
  bool asked_ = false;
  bool close_answered_ = false;
  TimePoint fence_by_ = TimePoint::max();
};

}  // namespace kvferry::verbs
