// Two ports of one transport in one process, stepped by one thread: what the contract suite runs on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/transports/transport.hpp>

namespace kvferry::test {

/// One transport under test.
struct ContractParam {
  std::string name;
  std::function<std::shared_ptr<Transport>()> make;
  /// Of the initiator's side, where it needs another one.
  std::function<std::shared_ptr<Transport>()> make_initiator = {};
  /// The target's CPU takes part, so slices are checked there too.
  bool target_checks = true;
  /// Items that are posted can still be taken back, for a while.
  bool cancels = true;
  /// Registering takes the memory at once, so that regions of many GiB are too much for a test.
  bool pins = false;
};

inline void PrintTo(const ContractParam& param, std::ostream* out) { *out << param.name; }

/// Notes everything a port reports.
class Recorder : public PortEvents {
 public:
  struct Immediate {
    SessionId session = 0;
    std::uint64_t sequence = 0;
    std::uint32_t value = 0;
  };
  struct Message {
    SessionId session = 0;
    std::uint64_t sequence = 0;
    std::vector<std::byte> bytes;
  };

  void on_channel_up(ChannelId channel) override { up.push_back(channel); }
  void on_channel_down(ChannelId channel, const Status& why) override {
    EXPECT_FALSE(down.contains(channel)) << "down twice";
    down.emplace(channel, why);
  }
  std::optional<SessionId> authorize(const Token& token) override {
    const auto found = sessions.find(token);
    return found == sessions.end() ? std::nullopt : std::optional(found->second);
  }
  bool on_notification(SessionId session, std::uint64_t sequence, std::uint32_t immediate) override {
    ++offers;
    if (!take_notifications) return false;
    if (when_notified) when_notified(immediate);
    immediates.push_back({session, sequence, immediate});
    return true;
  }
  bool on_message(SessionId session, std::uint64_t sequence, std::span<const std::byte> bytes) override {
    ++offers;
    if (!take_messages) return false;
    messages.push_back({session, sequence, {bytes.begin(), bytes.end()}});
    return true;
  }

  void on_request(ChannelId channel, std::string request) override {
    requests.emplace_back(channel, std::move(request));
  }

  std::vector<ChannelId> up;
  std::map<ChannelId, Status> down;
  std::vector<std::pair<ChannelId, std::string>> requests;
  std::map<Token, SessionId> sessions;
  bool take_notifications = true;
  bool take_messages = true;
  std::function<void(std::uint32_t)> when_notified;
  std::size_t offers = 0;
  std::vector<Immediate> immediates;
  std::vector<Message> messages;
};

/// One engine's share: a transport, its regions and one port.
class Side {
 public:
  Side(const ContractParam& param, std::uint64_t incarnation) : Side(param.make(), incarnation) {}
  Side(std::shared_ptr<Transport> made, std::uint64_t incarnation) : transport(std::move(made)) {
    context.regions = &regions;
    context.incarnation = incarnation;
    context.listen_host = "127.0.0.1";
    open_port();
  }
  ~Side() {
    port.reset();
    for (const auto& record : records_) transport->unregister_region(*record);
  }

  void open_port() {
    auto opened = transport->open_port(context, events);
    ASSERT_TRUE(opened) << opened.status().to_string();
    port = std::move(*opened);
  }

  /// Registers sparse zeroed memory.
  std::shared_ptr<const RegionRecord> add_region(const std::string& name, std::uint64_t bytes,
                                                 Access access = Access::read_write) {
    auto record = allocate_region(name, bytes, access);
    if (!record) throw StatusError(record.status());
    return add_region(std::move(*record));
  }
  std::shared_ptr<const RegionRecord> add_region(std::unique_ptr<RegionRecord> record) {
    auto added = regions.add(std::move(record));
    if (!added) throw StatusError(added.status());
    auto descriptor = transport->register_region(**added);
    if (!descriptor) throw StatusError(descriptor.status());
    descriptors_[(*added)->name] = *descriptor;
    records_.push_back(*added);
    return *added;
  }

  /// Lets go of a retired region, as an engine does once its ports have.
  void unregister(const RegionRecord& record) { transport->unregister_region(record); }

  /// What a peer would know of the region.
  RemoteRegion remote_view(const RegionRecord& record) const {
    RemoteRegion remote;
    remote.key = record.key;
    remote.name = record.name;
    remote.size = record.size;
    remote.access = record.access;
    remote.descriptors.emplace_back(std::string(transport->name()), descriptors_.at(record.name));
    return remote;
  }

  void poll() {
    if (!port) return;
    std::array<Completion, 8> found;
    const std::size_t count = port->poll(found);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t cookie = found[i].cookie;
      EXPECT_FALSE(completions.contains(cookie)) << "second completion of item " << cookie;
      completions[cookie] = found[i].status;
      if (when_complete) when_complete(cookie, found[i].status);
    }
  }

  std::shared_ptr<Transport> transport;
  RegionTable regions;
  Recorder events;
  PortContext context;
  std::unique_ptr<Port> port;
  std::map<std::uint64_t, Status> completions;
  std::function<void(std::uint64_t, const Status&)> when_complete;

 private:
  std::map<std::string, std::string> descriptors_;
  std::vector<std::shared_ptr<const RegionRecord>> records_;
};

class ContractTest : public testing::TestWithParam<ContractParam> {
 protected:
  static constexpr std::uint64_t target_incarnation = 0x1122334455667788;
  static constexpr SessionId session = 42;

  ContractTest()
      : target(GetParam(), target_incarnation),
        initiator(GetParam().make_initiator ? GetParam().make_initiator() : GetParam().make(), 0x99) {
    token.fill(std::byte{7});
    target.events.sessions[token] = session;
  }

  ChannelSpec spec(std::chrono::milliseconds limit = std::chrono::seconds(5)) const {
    ChannelSpec result;
    result.address = target.port->address();
    result.host = "127.0.0.1";
    result.token = token;
    result.target_incarnation = target_incarnation;
    result.give_up = Clock::now() + limit;
    return result;
  }

  /// Polls both sides in turn until `done`, for at most 20 s; false then.
  template <class Predicate>
  bool step_until(Predicate&& done) {
    const TimePoint limit = Clock::now() + std::chrono::seconds(20);
    while (!done()) {
      if (Clock::now() > limit) return false;
      step(1);
    }
    return true;
  }
  void step(int times) {
    for (int i = 0; i < times; ++i) {
      initiator.poll();
      target.poll();
      carry_requests();
    }
  }
  /// What the engines' control connections do.
  void carry_requests() {
    carry_requests(initiator, target);
    carry_requests(target, initiator);
  }
  static void carry_requests(Side& from, Side& to) {
    for (auto& [channel, request] : std::exchange(from.events.requests, {})) {
      Result<std::string> answer(Status(Errc::unreachable, "the peer is gone"));
      if (to.port) answer = to.port->serve(request);
      if (from.port) from.port->on_answer(channel, answer);
    }
  }
  /// Polls for so long: for what must not happen.
  void step_for(std::chrono::milliseconds time) {
    const TimePoint limit = Clock::now() + time;
    while (Clock::now() < limit) step(1);
  }

  /// Opens a channel and waits until it is up; 0 when it went down (see initiator.events.down).
  ChannelId open_channel() { return open_channel(spec()); }
  ChannelId open_channel(const ChannelSpec& with) {
    Result<ChannelId> opened = initiator.port->open(with);
    if (!opened) {
      open_error = opened.status();
      return 0;
    }
    const ChannelId channel = *opened;
    const auto is_up = [&] { return std::ranges::count(initiator.events.up, channel) == 1; };
    const auto decided = [&] { return is_up() || initiator.events.down.contains(channel); };
    EXPECT_TRUE(step_until(decided)) << "open is never decided";
    if (is_up()) return channel;
    open_error = initiator.events.down[channel];
    return 0;
  }

  /// Cuts a transfer as a poller would, carries it out and returns its outcome.
  Status transfer(ChannelId channel, Op op, const RegionRecord& local, const RemoteRegion& remote,
                  std::span<const Slice> slices) {
    const PortLimits limits = initiator.port->limits();
    std::vector<WorkItem> items;
    for (SliceCursor cursor(slices); !cursor.at_end();) {
      const SliceRange range = cursor.next(limits.item_bytes, limits.item_slices, limits.whole_bytes);
      items.push_back(item(op, local, remote, range));
    }
    return carry_out(channel, items);
  }

  WorkItem item(Op op, const RegionRecord& local, const RemoteRegion& remote, SliceRange range) {
    WorkItem made;
    made.op = op;
    made.cookie = ++last_cookie;
    made.local = &local;
    made.remote = &remote;
    made.slices = range;
    made.sequence = last_cookie;
    return made;
  }
  static SliceRange whole(std::span<const Slice> slices) {
    std::uint64_t bytes = 0;
    for (const Slice& slice : slices) bytes += slice.length;
    return {slices.data(), static_cast<std::uint32_t>(slices.size()), 0, bytes};
  }
  WorkItem message_item(std::span<const std::byte> bytes, std::uint64_t sequence) {
    WorkItem made;
    made.op = Op::send;
    made.cookie = ++last_cookie;
    made.sequence = sequence;
    made.message = bytes;
    return made;
  }
  WorkItem immediate_item(std::uint32_t immediate, std::uint64_t sequence) {
    WorkItem made;
    made.op = Op::write_imm;
    made.cookie = ++last_cookie;
    made.sequence = sequence;
    made.immediate = immediate;
    return made;
  }

  /// Posts everything, in as many portions as the port wants, and waits for all completions; the first
  /// error, or ok.
  Status carry_out(ChannelId channel, std::span<const WorkItem> items) {
    std::size_t posted = 0;
    const auto all_done = [&] {
      posted += initiator.port->post(channel, items.subspan(posted));
      return posted == items.size() && is_complete(items);
    };
    if (!step_until(all_done)) return {Errc::timed_out, "the items never completed"};
    return first_error(items);
  }
  bool is_complete(std::span<const WorkItem> items) const {
    return std::ranges::all_of(items,
                               [&](const WorkItem& item) { return initiator.completions.contains(item.cookie); });
  }
  Status first_error(std::span<const WorkItem> items) const {
    for (const WorkItem& item : items) {
      if (const Status& status = initiator.completions.at(item.cookie); !status) return status;
    }
    return {};
  }

  void fill_random(const RegionRecord& record) {
    std::vector<std::uint64_t> block(512);
    for (std::uint64_t offset = 0; offset < record.size; offset += 4096) {
      for (std::uint64_t& word : block) word = random();
      std::memcpy(record.data + offset, block.data(), std::min<std::uint64_t>(4096, record.size - offset));
    }
  }
  std::uint64_t random_below(std::uint64_t bound) { return random() % bound; }

  /// Slices that do not overlap on either side, in random order, with gaps and odd lengths.
  std::vector<Slice> scattered(std::uint64_t region_bytes, std::size_t count) {
    std::vector<std::uint64_t> local_places(count);
    for (std::size_t i = 0; i < count; ++i) local_places[i] = i;
    std::vector<std::uint64_t> remote_places = local_places;
    std::shuffle(local_places.begin(), local_places.end(), random);
    std::shuffle(remote_places.begin(), remote_places.end(), random);
    const std::uint64_t place = region_bytes / count;
    std::vector<Slice> slices;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t length = random_below(4) == 0 ? place : 1 + random_below(place);
      slices.push_back({local_places[i] * place, remote_places[i] * place, length});
    }
    return slices;
  }

  Side target;
  Side initiator;
  Token token{};
  std::mt19937_64 random{20240607};
  std::uint64_t last_cookie = 0;
  Status open_error;
};

}  // namespace kvferry::test
