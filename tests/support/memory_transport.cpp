#include "tests/support/memory_transport.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace kvferry::test {

namespace {

constexpr std::size_t items_per_poll = 64;
// A control that changes and an engine that has room again ring no bell.
constexpr Duration look_interval = std::chrono::milliseconds(1);

class MemoryPort;

// One lock for everything that ports share: a fake may be slow, it must be evidently right.
struct Hub {
  std::mutex mutex;
  std::map<std::string, MemoryPort*> ports;
  std::uint64_t next_port = 1;
};

Hub& hub() {
  static Hub the_hub;
  return the_hub;
}

bool take_one(std::atomic<std::uint32_t>& count) {
  std::uint32_t left = count.load();
  while (left > 0)
    if (count.compare_exchange_weak(left, left - 1)) return true;
  return false;
}

Status outside(std::string_view side, const std::string& region, std::uint64_t offset, std::uint64_t length,
               std::uint64_t size) {
  return {Errc::out_of_bounds, fmt::format("a slice of {} bytes at {} leaves the {} region '{}' of {} bytes", length,
                                           offset, side, region, size)};
}

// Something for another port's thread to do from inside its poll.
struct Event {
  enum class Kind : std::uint8_t { connect, up, down, notification, message };
  Kind kind = Kind::up;
  std::string from = {};  ///< address of the port at the other end of the channel
  ChannelId channel = 0;  ///< number at the initiator
  Status why = {};
  Token token = {};
  std::uint64_t incarnation = 0;
  std::uint64_t cookie = 0;
  std::uint64_t sequence = 0;
  std::uint32_t immediate = 0;
  std::vector<std::byte> bytes = {};
};

class MemoryPort final : public Port {
 public:
  MemoryPort(const MemoryOptions& options, const PortContext& context, PortEvents& events)
      : limits_(options.limits), control_(options.control), context_(context), events_(events) {
    wake_fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    const std::lock_guard lock(hub().mutex);
    address_ = fmt::format("{}:{}", options.name, hub().next_port++);
    hub().ports.emplace(address_, this);
    control_->ports.fetch_add(1);
  }

  ~MemoryPort() override {
    const std::lock_guard lock(hub().mutex);
    hub().ports.erase(address_);
    for (const auto& [address, port] : hub().ports) port->lose(address_);
    control_->ports.fetch_sub(1);
    ::close(wake_fd_);
  }

  MemoryPort(const MemoryPort&) = delete;
  MemoryPort& operator=(const MemoryPort&) = delete;

  PortLimits limits() const override { return limits_; }
  std::string address() const override { return address_; }
  int wait_fd() const override { return wake_fd_; }

  Result<ChannelId> open(const ChannelSpec& spec) override {
    const std::lock_guard lock(hub().mutex);
    const auto target = hub().ports.find(spec.address);
    if (target == hub().ports.end())
      return {Errc::unreachable, fmt::format("no port '{}' in this process", spec.address)};
    const ChannelId number = next_channel_++;
    channels_.emplace(number, Channel{spec.address, false, spec.give_up});
    target->second->notify({.kind = Event::Kind::connect,
                            .from = address_,
                            .channel = number,
                            .token = spec.token,
                            .incarnation = spec.target_incarnation});
    return number;
  }

  std::size_t post(ChannelId channel, std::span<const WorkItem> items) override {
    const std::lock_guard lock(hub().mutex);
    const auto found = channels_.find(channel);
    if (found == channels_.end() || !found->second.up) return 0;
    const auto open_items = static_cast<std::size_t>(std::count_if(
        items_.begin(), items_.end(), [channel](const auto& item) { return item.second.channel == channel; }));
    const std::size_t room = limits_.channel_items - std::min<std::size_t>(limits_.channel_items, open_items);
    const std::size_t taken = std::min(room, items.size());
    for (const WorkItem& item : items.first(taken)) {
      items_.emplace(item.cookie, Item{channel, item});
      queue_.push_back(item.cookie);
    }
    return taken;
  }

  void cancel(ChannelId channel, std::uint64_t cookie) override {
    const std::lock_guard lock(hub().mutex);
    const auto queued = std::find(queue_.begin(), queue_.end(), cookie);
    if (queued == queue_.end() || items_.at(cookie).channel != channel) return;
    queue_.erase(queued);
    finish(cookie, {Errc::cancelled, "cancelled before it moved"});
  }

  void fence(ChannelId channel, const Status& why) override {
    const std::lock_guard lock(hub().mutex);
    const auto found = channels_.find(channel);
    if (found == channels_.end()) return;
    const auto target = hub().ports.find(found->second.target);
    if (target != hub().ports.end()) target->second->disconnect(address_, channel);
    take_down(channel, why);
  }

  std::size_t poll(std::span<Completion> completions) override {
    drain_wakeups();
    give_up_on_late_channels();
    handle_events();
    deliver_from(notifications_);
    deliver_from(messages_);
    run_items();
    const std::lock_guard lock(hub().mutex);
    std::size_t count = 0;
    for (; count < completions.size() && !completions_.empty(); ++count) {
      completions[count] = std::move(completions_.front());
      completions_.pop_front();
    }
    return count;
  }

  Progress progress() const override {
    const std::lock_guard lock(hub().mutex);
    const bool may_run = !queue_.empty() && (!control_->hold || control_->released > 0);
    if (!inbox_.empty() || !notifications_.empty() || !messages_.empty() || !completions_.empty() || may_run)
      return Progress::runnable;
    return items_.empty() && !connecting() ? Progress::idle : Progress::waiting;
  }

  TimePoint next_wakeup() const override {
    const std::lock_guard lock(hub().mutex);
    const bool look_soon = !queue_.empty() || !notifications_.empty() || !messages_.empty();
    TimePoint next = look_soon ? Clock::now() + look_interval : TimePoint::max();
    for (const auto& [number, channel] : channels_)
      if (!channel.up) next = std::min(next, channel.give_up);
    return next;
  }

  // Bytes move under the lock and only for regions that are not retired, so nothing is ever in use.
  bool release_region(RegionKey, bool force) override { return force || !take_one(control_->refuse_releases); }

  void drop_session(SessionId session) override {
    const std::lock_guard lock(hub().mutex);
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      if (it->second != session) {
        ++it;
        continue;
      }
      const auto [address, channel] = it->first;
      it = sessions_.erase(it);
      forget_arrivals(address, channel);
      const auto initiator = hub().ports.find(address);
      if (initiator != hub().ports.end())
        initiator->second->take_down(channel, {Errc::channel_error, "the target dropped the session"});
    }
  }

 private:
  struct Channel {
    std::string target;
    bool up = false;
    TimePoint give_up;
  };
  struct Item {
    ChannelId channel = 0;
    WorkItem work;
  };
  using Connection = std::pair<std::string, ChannelId>;  ///< initiator's address and channel

  // ---- what needs the hub's lock to be held

  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_fd_, &one, sizeof one);
  }

  void notify(Event event) {
    queue_for(event.kind).push_back(std::move(event));
    wake();
  }

  std::deque<Event>& queue_for(Event::Kind kind) {
    if (kind == Event::Kind::notification) return notifications_;
    return kind == Event::Kind::message ? messages_ : inbox_;
  }

  void finish(std::uint64_t cookie, Status status) {
    if (items_.erase(cookie) == 0) return;
    control_->items_done.fetch_add(1);
    completions_.push_back({cookie, std::move(status)});
    wake();
  }

  void take_down(ChannelId channel, const Status& why) {
    if (channels_.erase(channel) == 0) return;
    std::vector<std::uint64_t> ended;
    for (const auto& [cookie, item] : items_)
      if (item.channel == channel) ended.push_back(cookie);
    for (const std::uint64_t cookie : ended) {
      queue_.erase(std::remove(queue_.begin(), queue_.end(), cookie), queue_.end());
      finish(cookie, {Errc::channel_error, std::string(why.text())});
    }
    notify({.kind = Event::Kind::down, .channel = channel, .why = why});
  }

  /// Serving side: a channel that its initiator ended.
  void disconnect(const std::string& initiator, ChannelId channel) {
    sessions_.erase({initiator, channel});
    forget_arrivals(initiator, channel);
  }

  void forget_arrivals(const std::string& initiator, ChannelId channel) {
    const auto theirs = [&](const Event& event) { return event.from == initiator && event.channel == channel; };
    for (auto* events : {&inbox_, &notifications_, &messages_}) std::erase_if(*events, theirs);
  }

  /// A port is gone: both what was opened to it and what it opened to here.
  void lose(const std::string& address) {
    std::vector<ChannelId> lost;
    for (const auto& [number, channel] : channels_)
      if (channel.target == address) lost.push_back(number);
    for (const ChannelId channel : lost)
      take_down(channel, {Errc::channel_error, fmt::format("the target's port '{}' was closed", address)});
    std::erase_if(sessions_, [&](const auto& session) { return session.first.first == address; });
    const auto theirs = [&](const Event& event) { return event.from == address; };
    for (auto* events : {&inbox_, &notifications_, &messages_}) std::erase_if(*events, theirs);
  }

  bool connecting() const {
    return std::any_of(channels_.begin(), channels_.end(), [](const auto& channel) { return !channel.second.up; });
  }

  // ---- the parts of poll

  void drain_wakeups() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(wake_fd_, &count, sizeof count);
  }

  void give_up_on_late_channels() {
    const std::lock_guard lock(hub().mutex);
    std::vector<ChannelId> late;
    for (const auto& [number, channel] : channels_)
      if (!channel.up && channel.give_up <= Clock::now()) late.push_back(number);
    for (const ChannelId channel : late) {
      const auto target = hub().ports.find(channels_.at(channel).target);
      if (target != hub().ports.end()) target->second->disconnect(address_, channel);
      take_down(channel, {Errc::unreachable, "the target's port did not answer in time"});
    }
  }

  // Events are handed out without the lock: what they call may take locks of its own.
  void handle_events() {
    while (auto event = next_of(inbox_)) handle(*event);
  }

  // Stops at the first one that finds no room, so that order is kept inside a kind.
  void deliver_from(std::deque<Event>& arrivals) {
    for (std::size_t i = 0; i < items_per_poll; ++i) {
      auto event = next_of(arrivals);
      if (!event) return;
      if (deliver(*event)) continue;
      const std::lock_guard lock(hub().mutex);
      if (sessions_.count({event->from, event->channel})) arrivals.push_front(std::move(*event));
      return;
    }
  }

  static std::optional<Event> next_of(std::deque<Event>& events) {
    const std::lock_guard lock(hub().mutex);
    if (events.empty()) return std::nullopt;
    Event event = std::move(events.front());
    events.pop_front();
    return event;
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case Event::Kind::connect:
        return answer(event);
      case Event::Kind::up:
        return events_.on_channel_up(event.channel);
      case Event::Kind::down:
        return events_.on_channel_down(event.channel, event.why);
      case Event::Kind::notification:
      case Event::Kind::message:
        break;
    }
  }

  void answer(const Event& event) {
    const bool stale = event.incarnation != context_.incarnation;
    const auto session = stale ? std::nullopt : events_.authorize(event.token);
    const std::lock_guard lock(hub().mutex);
    const auto initiator = hub().ports.find(event.from);
    if (initiator == hub().ports.end()) return;
    MemoryPort& port = *initiator->second;
    const auto channel = port.channels_.find(event.channel);
    if (channel == port.channels_.end()) return;
    if (session) {
      sessions_[{event.from, event.channel}] = *session;
      channel->second.up = true;
      port.notify({.kind = Event::Kind::up, .channel = event.channel});
    } else if (stale) {
      port.take_down(event.channel, {Errc::stale_peer, "the target has another incarnation"});
    } else {
      port.take_down(event.channel, {Errc::access_denied, "the target does not know the token"});
    }
  }

  /// False when there was no room: the event must be offered again.
  bool deliver(const Event& event) {
    SessionId session = 0;
    {
      const std::lock_guard lock(hub().mutex);
      const auto found = sessions_.find({event.from, event.channel});
      if (found == sessions_.end()) return true;
      session = found->second;
    }
    const bool taken = event.kind == Event::Kind::message
                           ? events_.on_message(session, event.sequence, event.bytes)
                           : events_.on_notification(session, event.sequence, event.immediate);
    if (!taken) return false;
    const std::lock_guard lock(hub().mutex);
    const auto initiator = hub().ports.find(event.from);
    if (initiator != hub().ports.end()) initiator->second->finish(event.cookie, {});
    return true;
  }

  void run_items() {
    const std::lock_guard lock(hub().mutex);
    for (std::size_t i = 0; i < items_per_poll && !queue_.empty(); ++i) {
      if (control_->hold && !take_one(control_->released)) return;
      const std::uint64_t cookie = queue_.front();
      queue_.pop_front();
      run(items_.at(cookie));
    }
  }

  void run(const Item& item) {
    const std::uint64_t cookie = item.work.cookie;
    // A channel that is up has a target: the target's end takes its channels down.
    MemoryPort& target = *hub().ports.at(channels_.at(item.channel).target);
    if (item.work.op == Op::send) {
      if (item.work.message.size() > max_message_bytes) return finish(cookie, too_long(item.work.message.size()));
      target.notify({.kind = Event::Kind::message,
                     .from = address_,
                     .channel = item.channel,
                     .cookie = cookie,
                     .sequence = item.work.sequence,
                     .bytes = {item.work.message.begin(), item.work.message.end()}});
      return;
    }
    if (Status status = target.serve(item.work); !status || item.work.op != Op::write_imm)
      return finish(cookie, std::move(status));
    target.notify({.kind = Event::Kind::notification,
                   .from = address_,
                   .channel = item.channel,
                   .cookie = cookie,
                   .sequence = item.work.sequence,
                   .immediate = item.work.immediate});
  }

  static Status too_long(std::size_t size) {
    return {Errc::too_large, fmt::format("a message of {} bytes: {} are allowed", size, max_message_bytes)};
  }

  /// The target's part of a read or write.
  Status serve(const WorkItem& work) const {
    if (work.slices.bytes == 0) return {};
    const RegionRecord* region = context_.regions->find(work.remote->key);
    if (region == nullptr)
      return {Errc::unknown_region, fmt::format("the target has no region '{}'", work.remote->name)};
    const Access need = work.op == Op::read ? Access::read : Access::write;
    if (!allows(region->access, need))
      return {Errc::access_denied, fmt::format("region '{}' does not allow {}", region->name, to_string(work.op))};
    Status status;
    work.slices.for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
      if (!status) return;
      if (!fits(local, length, work.local->size))
        status = outside("local", work.local->name, local, length, work.local->size);
      if (!fits(remote, length, region->size)) status = outside("remote", region->name, remote, length, region->size);
    });
    if (!status) return status;
    work.slices.for_each([&](std::uint64_t local, std::uint64_t remote, std::uint64_t length) {
      if (work.op == Op::read) {
        std::memmove(work.local->data + local, region->data + remote, length);
      } else {
        std::memmove(region->data + remote, work.local->data + local, length);
      }
    });
    return {};
  }

  const PortLimits limits_;
  const std::shared_ptr<MemoryControl> control_;
  const PortContext context_;
  PortEvents& events_;
  std::string address_;
  int wake_fd_ = -1;

  // ---- guarded by the hub's lock
  std::deque<Event> inbox_;          ///< what became of channels, and who wants one
  std::deque<Event> notifications_;  ///< these and messages may find no room and wait
  std::deque<Event> messages_;
  std::map<ChannelId, Channel> channels_;  ///< opened by this port
  ChannelId next_channel_ = 1;
  std::map<std::uint64_t, Item> items_;  ///< taken and not completed, by cookie
  std::deque<std::uint64_t> queue_;      ///< those of them that have not moved yet, in order
  std::deque<Completion> completions_;
  std::map<Connection, SessionId> sessions_;  ///< served by this port
};

class MemoryTransport final : public Transport {
 public:
  explicit MemoryTransport(MemoryOptions options) : options_(std::move(options)) {}

  std::string_view name() const override { return options_.name; }
  Status reaches(const HostFacts&, const HostFacts&) const override {
    return options_.control->reachable ? Status() : Status(Errc::no_path, "the test made the peer unreachable");
  }
  Result<std::string> register_region(const RegionRecord& region) override {
    if (take_one(options_.control->fail_registers))
      return {Errc::resource_exhausted, fmt::format("region '{}': the test made registration fail", region.name)};
    options_.control->regions.fetch_add(1);
    return std::string();
  }
  void unregister_region(const RegionRecord&) override { options_.control->regions.fetch_sub(1); }
  Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) override {
    return std::unique_ptr<Port>(std::make_unique<MemoryPort>(options_, context, events));
  }

 private:
  const MemoryOptions options_;
};

}  // namespace

std::shared_ptr<Transport> make_memory_transport(MemoryOptions options) {
  return std::make_shared<MemoryTransport>(std::move(options));
}

}  // namespace kvferry::test
