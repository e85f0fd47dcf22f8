#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kvferry/transports/fault.hpp>

namespace kvferry {

namespace {

// A sleeping poller does not see a plan change; this is how soon it looks.
constexpr Duration plan_check_interval = std::chrono::milliseconds(2);

bool take_one(std::atomic<std::uint32_t>& count) {
  std::uint32_t left = count.load();
  while (left > 0)
    if (count.compare_exchange_weak(left, left - 1)) return true;
  return false;
}

Duration microseconds_of(const std::atomic<std::int64_t>& value) { return std::chrono::microseconds(value.load()); }

// Flips the middle byte, which no header or length of a test's pattern is likely to occupy.
void corrupt(const WorkItem& item) {
  std::uint64_t left = item.slices.bytes / 2;
  bool flipped = false;
  item.slices.for_each([&](std::uint64_t local_offset, std::uint64_t, std::uint64_t length) {
    if (!flipped && left < length) {
      item.local->data[local_offset + left] ^= std::byte{0xff};
      flipped = true;
    }
    left -= std::min(left, length);
  });
}

Status rail_is_down() { return {Errc::channel_error, "the rail is down (fault plan)"}; }

class FaultPort final : public Port, private PortEvents {
 public:
  FaultPort(std::shared_ptr<FaultPlan> plan, PortEvents& events) : plan_(std::move(plan)), events_(events) {}

  Status start(Transport& inner, const PortContext& context) {
    auto port = inner.open_port(context, *this);
    if (!port) return port.status();
    inner_ = std::move(*port);
    return {};
  }

  PortLimits limits() const override { return inner_->limits(); }
  std::string address() const override { return inner_->address(); }
  int wait_fd() const override { return inner_->wait_fd(); }
  bool release_region(RegionKey region, bool force) override { return inner_->release_region(region, force); }
  void drop_session(SessionId session) override { inner_->drop_session(session); }

  Result<ChannelId> open(const ChannelSpec& spec) override {
    if (plan_->rail_down) return {Errc::unreachable, "opening a channel: the rail is down (fault plan)"};
    if (take_one(plan_->refuse_opens)) return {Errc::unreachable, "opening a channel was refused (fault plan)"};
    auto channel = inner_->open(spec);
    if (channel) channels_.emplace(*channel, ChannelState::connecting);
    return channel;
  }

  std::size_t post(ChannelId channel, std::span<const WorkItem> items) override {
    if (plan_->rail_down || !is(channel, ChannelState::up)) return 0;
    if (items.empty() || take_one(plan_->refuse_posts)) return 0;
    const Duration delay = microseconds_of(plan_->delay_us);
    std::size_t taken = 0;
    while (taken < items.size() && take(channel, items[taken], delay)) ++taken;
    plan_->items.fetch_add(taken);
    return taken;
  }

  void cancel(ChannelId channel, std::uint64_t cookie) override {
    plan_->cancels.fetch_add(1);
    if (plan_->ignore_cancel) return;
    for (auto it = delayed_.begin(); it != delayed_.end(); ++it) {
      if (it->second.cookie != cookie) continue;
      finish({cookie, {Errc::cancelled, "cancelled before it was posted (fault plan)"}});
      delayed_.erase(it);
      return;
    }
    inner_->cancel(channel, cookie);
  }

  void fence(ChannelId channel, const Status& why) override {
    plan_->fences.fetch_add(1);
    quieten(channel, why);
  }

  std::size_t poll(std::span<Completion> completions) override {
    if (plan_->rail_down) break_channels();
    post_due();
    poll_inner(completions.size());
    release_due();
    std::size_t count = 0;
    for (; count < completions.size() && !ready_.empty(); ++count) {
      completions[count] = std::move(ready_.front());
      ready_.pop_front();
    }
    return count;
  }

  void on_answer(ChannelId channel, const Result<std::string>& answer) override { inner_->on_answer(channel, answer); }
  Result<std::string> serve(std::string_view request) override { return inner_->serve(request); }

  Progress progress() const override {
    const TimePoint now = Clock::now();
    const bool due = (!delayed_.empty() && delayed_.begin()->first <= now) ||
                     (!held_.empty() && held_.begin()->first <= now) || !ready_.empty();
    if (due || (plan_->rail_down && has_unfenced())) return Progress::runnable;
    const Progress inner = inner_->progress();
    return inner == Progress::idle && !(delayed_.empty() && held_.empty()) ? Progress::waiting : inner;
  }

  TimePoint next_wakeup() const override {
    TimePoint next = inner_->next_wakeup();
    if (!delayed_.empty()) next = std::min(next, delayed_.begin()->first);
    if (!held_.empty()) next = std::min(next, held_.begin()->first);
    if (!channels_.empty()) next = std::min(next, Clock::now() + plan_check_interval);
    return next;
  }

 private:
  enum class ChannelState : std::uint8_t { connecting, up, fenced };

  struct InFlight {
    ChannelId channel = 0;
    bool corrupt = false;
    bool spoilt = false;  ///< a byte of the local region is flipped
    WorkItem item;
  };

  bool is(ChannelId channel, ChannelState state) const {
    const auto found = channels_.find(channel);
    return found != channels_.end() && found->second == state;
  }

  bool has_unfenced() const {
    return std::any_of(channels_.begin(), channels_.end(),
                       [](const auto& channel) { return channel.second != ChannelState::fenced; });
  }

  // ---- taking items

  bool take(ChannelId channel, const WorkItem& item, Duration delay) {
    // The wrapper's own queue must not make a channel look deeper than it is.
    const auto open_items = outstanding_.find(channel);
    if (open_items != outstanding_.end() && open_items->second >= inner_->limits().channel_items) return false;
    const bool delay_it = delay > Duration::zero();
    if (take_one(plan_->fail_items)) {
      begin(channel, item, false);
      finish({item.cookie, {Errc::channel_error, "this item was made to fail (fault plan)"}});
      return true;
    }
    const bool spoil = item.op == Op::write && item.slices.bytes > 0 && take_one(plan_->corrupt_writes);
    if (spoil) corrupt(item);
    if (!delay_it && inner_->post(channel, {&item, 1}) == 0) {
      if (spoil) corrupt(item), plan_->corrupt_writes.fetch_add(1);
      return false;
    }
    begin(channel, item, item.op == Op::read && item.slices.bytes > 0 && take_one(plan_->corrupt_items));
    in_flight_.at(item.cookie).spoilt = spoil;
    if (delay_it) delayed_.emplace(Clock::now() + delay, Delayed{channel, item.cookie});
    return true;
  }

  void begin(ChannelId channel, const WorkItem& item, bool corrupt_it) {
    in_flight_.emplace(item.cookie, InFlight{channel, corrupt_it, false, item});
    ++outstanding_[channel];
  }

  void post_due() {
    const TimePoint now = Clock::now();
    for (auto it = delayed_.begin(); it != delayed_.end() && it->first <= now;) {
      const auto& [channel, cookie] = it->second;
      const bool taken = inner_->post(channel, {&in_flight_.at(cookie).item, 1}) == 1;
      it = taken ? delayed_.erase(it) : std::next(it);
    }
  }

  // ---- giving completions

  void poll_inner(std::size_t most) {
    buffer_.resize(most);
    const std::size_t count = inner_->poll(buffer_);
    const Duration hold = microseconds_of(plan_->completion_delay_us);
    for (std::size_t i = 0; i < count; ++i) {
      Completion& completion = buffer_[i];
      const InFlight& done = in_flight_.at(completion.cookie);
      if (done.corrupt && completion.status.is_ok()) corrupt(done.item);
      if (hold > Duration::zero() && is(done.channel, ChannelState::up)) {
        held_.emplace(Clock::now() + hold, std::move(completion));
      } else {
        finish(std::move(completion));
      }
    }
  }

  void release_due() {
    const TimePoint now = Clock::now();
    while (!held_.empty() && held_.begin()->first <= now) {
      finish(std::move(held_.begin()->second));
      held_.erase(held_.begin());
    }
  }

  void finish(Completion completion) {
    const auto done = in_flight_.find(completion.cookie);
    const auto channel = outstanding_.find(done->second.channel);  // dead channels must leave nothing behind
    if (--channel->second == 0) outstanding_.erase(channel);
    if (done->second.spoilt) corrupt(done->second.item);
    in_flight_.erase(done);
    ready_.push_back(std::move(completion));
  }

  // ---- ending channels

  void break_channels() {
    for (const auto& [channel, state] : channels_)
      if (state != ChannelState::fenced) quieten(channel, rail_is_down());
  }

  void quieten(ChannelId channel, const Status& why) {
    const auto found = channels_.find(channel);
    if (found != channels_.end()) found->second = ChannelState::fenced;
    end_own_items(channel, why);
    inner_->fence(channel, why);
  }

  // Queued items never moved and held ones move no more, so both may be told at once.
  void end_own_items(ChannelId channel, const Status& why) {
    for (auto it = delayed_.begin(); it != delayed_.end();) {
      if (it->second.channel != channel) {
        ++it;
        continue;
      }
      finish({it->second.cookie, {Errc::channel_error, std::string(why.text())}});
      it = delayed_.erase(it);
    }
    for (auto it = held_.begin(); it != held_.end();) {
      if (in_flight_.at(it->second.cookie).channel != channel) {
        ++it;
        continue;
      }
      finish(std::move(it->second));
      it = held_.erase(it);
    }
  }

  // ---- what the inner port says

  void on_channel_up(ChannelId channel) override {
    if (is(channel, ChannelState::connecting)) channels_[channel] = ChannelState::up;
    events_.on_channel_up(channel);
  }
  void on_channel_down(ChannelId channel, const Status& why) override {
    channels_.erase(channel);
    end_own_items(channel, why);
    events_.on_channel_down(channel, why);
  }
  void on_request(ChannelId channel, std::string request) override { events_.on_request(channel, std::move(request)); }
  std::optional<SessionId> authorize(const Token& token) override { return events_.authorize(token); }
  bool on_notification(SessionId session, std::uint64_t sequence, std::uint32_t immediate) override {
    return events_.on_notification(session, sequence, immediate);
  }
  bool on_message(SessionId session, std::uint64_t sequence, std::span<const std::byte> bytes) override {
    return events_.on_message(session, sequence, bytes);
  }

  struct Delayed {
    ChannelId channel = 0;
    std::uint64_t cookie = 0;
  };

  std::shared_ptr<FaultPlan> plan_;
  PortEvents& events_;
  std::map<ChannelId, ChannelState> channels_;  ///< opened, and not reported down
  std::unordered_map<ChannelId, std::uint32_t> outstanding_;
  std::unordered_map<std::uint64_t, InFlight> in_flight_;  ///< by cookie
  std::multimap<TimePoint, Delayed> delayed_;              ///< not yet posted to the inner port
  std::multimap<TimePoint, Completion> held_;              ///< done, not yet reported
  std::deque<Completion> ready_;
  std::vector<Completion> buffer_;
  std::unique_ptr<Port> inner_;  ///< last, so that it ends before what its events touch
};

class FaultTransport final : public Transport {
 public:
  FaultTransport(std::shared_ptr<Transport> inner, std::shared_ptr<FaultPlan> plan, std::string name)
      : inner_(std::move(inner)), plan_(std::move(plan)), name_(std::move(name)) {
    if (name_.empty()) name_ = "fault+" + std::string(inner_->name());
  }

  std::string_view name() const override { return name_; }
  bool one_sided() const override { return inner_->one_sided(); }
  std::uint32_t paths() const override { return inner_->paths(); }
  Status reaches(const HostFacts& self, const HostFacts& peer) const override { return inner_->reaches(self, peer); }
  Result<std::string> register_region(const RegionRecord& region) override { return inner_->register_region(region); }
  void unregister_region(const RegionRecord& region) override { inner_->unregister_region(region); }
  Result<std::unique_ptr<Port>> open_port(const PortContext& context, PortEvents& events) override {
    auto port = std::make_unique<FaultPort>(plan_, events);
    if (Status status = port->start(*inner_, context); !status) return status;
    return std::unique_ptr<Port>(std::move(port));
  }

 private:
  std::shared_ptr<Transport> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::string name_;
};

}  // namespace

std::shared_ptr<Transport> make_fault_transport(std::shared_ptr<Transport> inner, std::shared_ptr<FaultPlan> plan,
                                                std::string name) {
  return std::make_shared<FaultTransport>(std::move(inner), std::move(plan), std::move(name));
}

}  // namespace kvferry
