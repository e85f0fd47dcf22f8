#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/actors/poller_core.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

std::uint64_t item_bytes_for(const TransferState& transfer, std::size_t rails, const PortLimits& limits) {
  const std::uint64_t items = limits.side_by_side * rails;
  if (items == 0) return limits.item_bytes;
  const std::uint64_t share = (transfer.bytes() + items - 1) / items;
  return share <= PortLimits::large_item * limits.item_bytes ? std::max(share, limits.item_bytes) : limits.item_bytes;
}

}  // namespace

// ---------------------------------------------------------------- small parts

/// One port of this poller: keeps its channels' rails and passes its events on.
class PollerCore::PortSlot final : public PortEvents {
 public:
  PortSlot(PollerCore& core, std::string name) : core_(core), name_(std::move(name)) {}

  void on_channel_up(ChannelId channel) override { core_.on_channel(*this, channel, true, {}); }
  void on_channel_down(ChannelId channel, const Status& why) override { core_.on_channel(*this, channel, false, why); }

  void on_request(ChannelId channel, std::string request) override {
    const auto found = rails.find(channel);
    if (found == rails.end()) return;
    const auto& [lane, rail] = found->second;
    core_.parts_.events->request({lane->peer, channel, name_, rail->spec.channel.address, std::move(request)});
  }

  std::optional<SessionId> authorize(const Token& token) override { return core_.parts_.peers->authorize(token); }

  bool on_notification(SessionId session, std::uint64_t sequence, std::uint32_t immediate) override {
    const auto peer = core_.parts_.peers->find_slot(static_cast<std::uint32_t>(session));
    if (!peer) return true;
    if (!peer->accept_notification(sequence, *core_.parts_.notifications, immediate)) return false;
    core_.parts_.metrics->notifications.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  bool on_message(SessionId session, std::uint64_t sequence, std::span<const std::byte> bytes) override {
    const auto peer = core_.parts_.peers->find_slot(static_cast<std::uint32_t>(session));
    if (!peer) return true;
    if (!peer->messages.offer(sequence, bytes)) return false;
    core_.parts_.metrics->messages.fetch_add(1, std::memory_order_relaxed);
    if (core_.message_arrived_) core_.message_arrived_();
    return true;
  }

  const std::string& name() const { return name_; }

  std::unique_ptr<Port> port;
  PortLimits limits;
  std::uint32_t bit = 0;
  std::unordered_map<ChannelId, std::pair<Lane*, Rail*>> rails;

 private:
  PollerCore& core_;
  std::string name_;
};

void PollerCore::ChunkList::push_back(Chunk* chunk) noexcept {
  chunk->next = nullptr;
  chunk->previous = tail;
  (tail ? tail->next : head) = chunk;
  tail = chunk;
}

void PollerCore::ChunkList::remove(Chunk* chunk) noexcept {
  (chunk->previous ? chunk->previous->next : head) = chunk->next;
  (chunk->next ? chunk->next->previous : tail) = chunk->previous;
}

bool PollerCore::EarlierFirst::operator()(const Job* a, const Job* b) const noexcept {
  const auto left = a->transfer->deadline();
  const auto right = b->transfer->deadline();
  return left != right ? left < right : a->order < b->order;
}

PollerCore::PollerCore(const Parts& parts, std::function<void()> message_arrived)
    : parts_(parts), message_arrived_(std::move(message_arrived)) {}

PollerCore::~PollerCore() {
  // A port's destruction quietens its items; only then may their transfers end.
  for (auto& slot : ports_) slot->port.reset();
  if (stopped_.is_ok()) stopped_ = {Errc::shutting_down, "the engine is being destroyed"};
  while (active_) {
    Job& job = *active_;
    job.in_flight = job.waiting = {};
    finish(job, job.ending.is_ok() ? stopped_ : job.ending);
  }
  for (TransferState* next = parts_.submissions->close(); next;) {
    const RefPtr<TransferState> transfer(std::exchange(next, next->next), true);
    transfer->complete(stopped_);
  }
}

Status PollerCore::add_port(Transport& transport, const PortContext& context) {
  auto slot = std::make_unique<PortSlot>(*this, std::string(transport.name()));
  auto port = transport.open_port(context, *slot);
  if (!port) return port.status().with_context(fmt::format("transport '{}'", transport.name()));
  slot->port = std::move(*port);
  slot->limits = slot->port->limits();
  slot->bit = 1u << ports_.size();
  ports_.push_back(std::move(slot));
  return {};
}

std::vector<PortAdvert> PollerCore::adverts() const {
  std::vector<PortAdvert> adverts;
  adverts.reserve(ports_.size());
  for (const auto& slot : ports_) adverts.push_back({slot->name(), slot->port->address()});
  return adverts;
}

void PollerCore::on_answer(const std::string& transport, ChannelId channel, const Result<std::string>& answer) {
  for (const auto& slot : ports_)
    if (slot->name() == transport) slot->port->on_answer(channel, answer);
}

Result<std::string> PollerCore::serve(const std::string& transport, const std::string& address,
                                      std::string_view request) {
  for (const auto& slot : ports_)
    if (slot->name() == transport && slot->port->address() == address) return slot->port->serve(request);
  return {Errc::unreachable, fmt::format("there is no such port of the transport '{}' here", transport)};
}

std::vector<int> PollerCore::wait_fds() const {
  std::vector<int> fds;
  fds.reserve(ports_.size());
  for (const auto& slot : ports_) fds.push_back(slot->port->wait_fd());
  return fds;
}

// ---------------------------------------------------------------- one round

Progress PollerCore::step(TimePoint now) {
  now_ = now;
  ++step_;
  made_progress_ = false;
  if (now >= retry_at_) {
    retry_at_ = TimePoint::max();
    for (auto& [peer, lane] : lanes_) lane->dirty = any_dirty_ = true;
  }
  take_submissions();
  pump();
  poll_ports();
  if (receives_ > 0) pump_receives();
  if (now >= earliest_deadline_) expire();
  if (now >= earliest_fence_) fence_overdue();
  if (!releases_.empty()) work_on_releases();
  pump();
  if (closing_lanes_) erase_closed_lanes();

  if (made_progress_ || any_dirty_) return Progress::runnable;
  Progress progress = Progress::idle;
  for (const auto& slot : ports_) progress = std::max(progress, slot->port->progress());
  return progress;
}

TimePoint PollerCore::next_wakeup() const {
  TimePoint earliest = std::min({earliest_deadline_, earliest_fence_, retry_at_});
  for (const auto& slot : ports_) earliest = std::min(earliest, slot->port->next_wakeup());
  if (!releases_.empty()) earliest = std::min(earliest, now_ + std::chrono::milliseconds(1));
  return earliest;
}

// ---------------------------------------------------------------- taking in

void PollerCore::take_submissions() {
  for (TransferState* next = parts_.submissions->take(); next;) {
    TransferState* current = std::exchange(next, next->next);
    accept(RefPtr<TransferState>(current, true));
    made_progress_ = true;
  }
  for (const auto& transfer : parts_.submissions->take_cancelled()) {
    // Every poller is told of a cancel, one of them has the transfer; or none yet, then accept() sees it.
    if (transfer->carrier.load(std::memory_order_relaxed) != this) continue;
    Job& job = *static_cast<Job*>(transfer->owner_data);
    begin_end(job, cancelled(job), parts_.config->drain_grace);
    made_progress_ = true;
  }
}

void PollerCore::accept(RefPtr<TransferState> transfer) {
  Lane& lane = lane_of(transfer->peer_slot);
  Job& job = *new_job(std::move(transfer), lane);
  if (!stopped_.is_ok()) return finish(job, stopped_);
  if (!lane.closed.is_ok()) return finish(job, lane.closed);
  if (job.transfer->cancel_requested()) return finish(job, cancelled(job));
  // A push that was under way when its peer was given up comes after its lane has ended. The state was
  // set before, so a fresh lane without rails tells.
  const PeerState state = lane.record->state.load(std::memory_order_acquire);
  if (lane.rails.empty() && (state == PeerState::lost || state == PeerState::stale || state == PeerState::closed))
    return finish(job, lane.record->refusal());
  const RegionRecord* local = job.transfer->local();
  // Between submission and now the region may have been withdrawn.
  if (local && parts_.regions->find(local->key) != local)
    return finish(
        job, {Errc::cancelled, fmt::format("{}: the local region '{}' was unregistered", describe(job), local->name)});
  earliest_deadline_ = std::min(earliest_deadline_, job.transfer->deadline());
  if (job.transfer->op() == Op::recv) return accept_receive(job);
  if (job.transfer->op() == Op::send) {
    lane.messages.push_back(&job);
  } else {
    for (const auto& [region, bits] : lane.impossible)
      if (region == job.transfer->remote()->key) job.excluded |= bits;
    if (post_at_once(lane, job)) return;
    enqueue(job);
  }
  lane.dirty = any_dirty_ = true;
}

// The common case spares the queue: nobody is ahead, and one item is all there is.
bool PollerCore::post_at_once(Lane& lane, Job& job) {
  for (const auto& queue : lane.queues)
    if (!queue.empty()) return false;
  bool hopeless = false;
  Rail* rail = pick_rail(lane, job, hopeless);
  if (!rail) return false;
  Chunk* chunk = next_chunk(job, rail->port->limits);
  if (!chunk) return false;
  if (!post(*rail, *chunk)) {
    job.waiting.push_back(chunk);
    return false;
  }
  return job.cursor.at_end();
}

void PollerCore::accept_receive(Job& job) {
  job.lane->receives.push_back(&job);
  ++receives_;
}

PollerCore::Lane& PollerCore::lane_of(std::uint32_t peer) {
  auto& lane = lanes_[peer];
  if (!lane) {
    lane = std::make_unique<Lane>(&memory_);
    lane->peer = peer;
    lane->record = parts_.peers->find_slot(peer);
    if (!lane->record) lane->closed = {Errc::peer_lost, fmt::format("peer number {} is not connected any more", peer)};
    if (!lane->closed.is_ok()) closing_lanes_ = true;
  }
  return *lane;
}

// ---------------------------------------------------------------- posting

void PollerCore::pump() {
  if (!any_dirty_) return;
  any_dirty_ = false;
  for (auto& [peer, lane] : lanes_) {
    if (!lane->dirty) continue;
    lane->dirty = false;
    pump(*lane);
  }
}

void PollerCore::pump(Lane& lane) {
  pump_messages(lane);
  while (Job* job = next_job(lane)) {
    if (!post_next(lane, *job)) break;
    made_progress_ = true;
  }
}

PollerCore::Job* PollerCore::next_job(Lane& lane) {
  Job* best = nullptr;
  for (auto& queue : lane.queues) {
    if (queue.empty()) continue;
    if (!best) {
      best = *queue.begin();
      continue;
    }
    // A lower class waits: every so often it goes first, so that it never starves.
    if (++lane.served_in_row >= aging_period) {
      lane.served_in_row = 0;
      return *queue.begin();
    }
    break;
  }
  return best;
}

bool PollerCore::post_next(Lane& lane, Job& job) {
  bool hopeless = false;
  Rail* rail = pick_rail(lane, job, hopeless);
  if (!rail) {
    if (hopeless) {
      orphan(job, job.last_error.is_ok() ? no_rail_status(lane) : job.last_error);
      return true;
    }
    if (parts_.groups > 1) retry_at_ = std::min(retry_at_, now_ + std::chrono::milliseconds(10));
    return false;
  }
  Chunk* chunk = next_chunk(job, rail->port->limits);
  if (!chunk) {
    dequeue(job);
    advance(job);
    return true;
  }
  if (post(*rail, *chunk)) {
    if (job.waiting.empty() && job.cursor.at_end()) dequeue(job);
    return true;
  }
  job.waiting.push_back(chunk);
  return false;
}

PollerCore::Chunk* PollerCore::next_chunk(Job& job, const PortLimits& limits) {
  if (!job.waiting.empty()) {
    Chunk* chunk = job.waiting.head;
    job.waiting.remove(chunk);
    return chunk;
  }
  const TransferState& transfer = *job.transfer;
  const bool needs_immediate = transfer.op() == Op::write_imm && !job.immediate_sent;
  if (job.cursor.at_end() && (!needs_immediate || job.cut)) return nullptr;
  Chunk* chunk = new_chunk(job);
  if (!job.cursor.at_end())
    chunk->range = job.cursor.next(item_bytes_for(transfer, job.lane->rails.size(), limits), limits.item_slices,
                                   limits.whole_bytes);
  chunk->bytes = chunk->range.bytes;
  chunk->op = transfer.op() == Op::read ? Op::read : Op::write;
  // A single item carries its immediate along; otherwise the immediate follows when all data is there.
  if (needs_immediate && !job.cut && job.cursor.at_end()) {
    chunk->op = Op::write_imm;
    chunk->sequence = immediate_sequence(*job.transfer);
    job.immediate_sent = true;
  }
  job.cut = true;
  return chunk;
}

bool PollerCore::post(Rail& rail, Chunk& chunk) {
  Job& job = *chunk.job;
  WorkItem item;
  item.op = chunk.op;
  item.cookie = (std::uint64_t{chunk.use} << 32) | chunk.index;
  item.local = job.transfer->local();
  item.remote = job.transfer->remote().get();
  item.slices = chunk.range;
  item.immediate = job.transfer->immediate();
  item.sequence = chunk.sequence;
  item.transfer_bytes = job.transfer->bytes();
  item.waiters = &job.transfer->work_offer();
  if (chunk.op == Op::send) item.message = job.transfer->message();
  if (rail.port->port->post(rail.channel, {&item, 1}) == 0) {
    rail.blocked_in_step = step_;
    retry_at_ = std::min(retry_at_, now_ + std::chrono::microseconds(100));
    return false;
  }
  chunk.rail = &rail;
  chunk.posted = now_;
  chunk.post_number = ++last_post_;
  job.in_flight.push_back(&chunk);
  ++job.outstanding;
  ++rail.items;
  rail.bytes += chunk.bytes;
  parts_.metrics->items_posted.fetch_add(1, std::memory_order_relaxed);
  return true;
}

PollerCore::Rail* PollerCore::pick_rail(const Lane& lane, const Job& job, bool& hopeless) const {
  std::uint32_t tier = UINT32_MAX;
  bool any = false;
  bool open = false;
  for (const auto& rail : lane.rails) {
    if (job.excluded & rail->port_bit) continue;
    any = true;
    open |= rail->open;
    if (rail->up) tier = std::min(tier, rail->spec.tier);
  }
  // Without hope here are transfers whose rails are all ruled out, and those whose rails are all down
  // while another group has one that is up.
  hopeless = (!any && !lane.rails.empty()) || (!open && another_group_is_up(lane));
  const bool alone = lane.rails.size() == 1;
  Rail* best = nullptr;
  double best_cost = 0;
  for (const auto& rail : lane.rails) {
    if (!rail->up || rail->spec.tier != tier || (job.excluded & rail->port_bit)) continue;
    if (rail->items >= rail->port->limits.channel_items || rail->blocked_in_step == step_) continue;
    const std::uint64_t detour = alone ? 0 : detour_of(*rail, job);
    const double cost = (static_cast<double>(rail->bytes + detour) + 4096.0) * rail->ns_per_byte;
    if (!best || cost < best_cost) best = rail.get(), best_cost = cost;
  }
  return best;
}

std::uint64_t PollerCore::detour_of(const Rail& rail, const Job& job) {
  const RegionRecord* local = job.transfer->local();
  return local == nullptr ? 0 : rail.port->port->detour_bytes(rail.channel, *local);
}

bool PollerCore::another_group_is_up(const Lane& lane) const {
  if (parts_.groups == 1 || !lane.record) return false;
  const auto route = lane.record->route();
  return route && std::any_of(route->groups.begin(), route->groups.end(),
                              [&](std::uint32_t group) { return group != parts_.group; });
}

std::uint64_t PollerCore::immediate_sequence(TransferState& transfer) noexcept {
  if (transfer.sequence == 0) transfer.sequence = (std::uint64_t{parts_.group} << 56) | next_sequence_++;
  return transfer.sequence;
}

// ---------------------------------------------------------------- messages

PollerCore::Rail* PollerCore::pick_message_rail(Lane& lane) {
  if (lane.message_rail && lane.message_rail->up) return lane.message_rail;
  lane.message_rail = nullptr;
  if (lane.messages_outstanding > 0) return nullptr;
  for (const auto& rail : lane.rails)
    if (rail->up && (!lane.message_rail || rail->spec.tier < lane.message_rail->spec.tier))
      lane.message_rail = rail.get();
  return lane.message_rail;
}

void PollerCore::pump_messages(Lane& lane) {
  if (lane.messages.empty() && lane.message_retry.empty()) return;
  // Order holds because one rail carries all, and repeats wait until the broken rail has let go of
  // everything it had.
  if (!lane.message_retry.empty() && lane.messages_outstanding > 0) return;
  Rail* rail = pick_message_rail(lane);
  if (!rail) return;
  std::sort(lane.message_retry.begin(), lane.message_retry.end(),
            [](const Chunk* a, const Chunk* b) { return a->sequence < b->sequence; });
  while (!lane.message_retry.empty() && rail->blocked_in_step != step_) {
    Chunk* chunk = lane.message_retry.front();
    chunk->job->waiting.remove(chunk);
    if (!post(*rail, *chunk)) {
      chunk->job->waiting.push_back(chunk);
      return;
    }
    lane.message_retry.erase(lane.message_retry.begin());
    ++lane.messages_outstanding;
  }
  while (!lane.messages.empty() && lane.messages_outstanding < message_window && rail->blocked_in_step != step_ &&
         rail->items < rail->port->limits.channel_items) {
    Job& job = *lane.messages.front();
    Chunk* chunk = new_chunk(job);
    chunk->op = Op::send;
    chunk->bytes = job.transfer->message().size();
    if (job.transfer->sequence == 0)
      job.transfer->sequence = lane.record->next_message.fetch_add(1, std::memory_order_relaxed);
    chunk->sequence = job.transfer->sequence;
    if (!post(*rail, *chunk)) {
      free_chunk(*chunk);
      return;
    }
    job.cut = true;
    lane.messages.pop_front();
    ++lane.messages_outstanding;
    made_progress_ = true;
  }
}

void PollerCore::pump_receives() {
  for (auto& [peer, lane] : lanes_) {
    while (!lane->receives.empty() && !lane->record->messages.empty()) {
      Job& job = *lane->receives.front();
      const auto buffer = job.transfer->receive_buffer;
      const auto size = lane->record->messages.take(buffer);
      if (!size) break;
      if (*size > buffer.size()) {
        finish(job, {Errc::too_large, fmt::format("the next message of peer '{}' has {} bytes, the buffer {}: it stays "
                                                  "queued for a larger buffer",
                                                  lane->record->name, *size, buffer.size())});
      } else {
        job.transfer->set_bytes(*size);
        finish(job, {});
      }
      made_progress_ = true;
    }
  }
}

// ---------------------------------------------------------------- completions

void PollerCore::poll_ports() {
  std::array<Completion, 64> completions;
  for (const auto& slot : ports_) {
    const std::size_t count = slot->port->poll(completions);
    for (std::size_t i = 0; i < count; ++i) on_completion(*slot, completions[i]);
    made_progress_ |= count > 0;
  }
}

void PollerCore::on_completion(PortSlot& port, const Completion& completion) {
  const auto index = static_cast<std::uint32_t>(completion.cookie);
  if (index >= chunk_storage_.size() || chunk_storage_[index].use != completion.cookie >> 32 ||
      !chunk_storage_[index].rail) {
    log(LogLevel::error, fmt::format("transport '{}' completed an item that is not in flight", port.name()));
    return;
  }
  settle(chunk_storage_[index], completion.status);
}

void PollerCore::settle(Chunk& chunk, const Status& status) {
  Job& job = *chunk.job;
  Lane& lane = *job.lane;
  Rail& rail = *chunk.rail;
  lane.dirty = any_dirty_ = true;
  if (status.is_ok() && chunk.bytes > 0) {
    // What the rail needed for everything that was in flight on it, smoothed (RFC 6298's gain of 1/8).
    const double took = std::chrono::duration<double, std::nano>(now_ - chunk.posted).count();
    const double sample = took / static_cast<double>(std::max(rail.bytes, chunk.bytes));
    rail.ns_per_byte += (sample - rail.ns_per_byte) / 8;
  }
  --rail.items;
  rail.bytes -= chunk.bytes;
  --job.outstanding;
  job.in_flight.remove(&chunk);
  chunk.rail = nullptr;
  if (chunk.op == Op::send) --lane.messages_outstanding;

  if (status.is_ok()) {
    job.done_bytes += chunk.bytes;
    free_chunk(chunk);
    return advance(job);
  }
  if (!job.ending.is_ok()) {
    free_chunk(chunk);
    return advance(job);
  }
  if (status == Errc::channel_error || status == Errc::no_path || status == Errc::cancelled) {
    if (status == Errc::no_path) {
      job.excluded |= rail.port_bit;
      // Leases come and go: this transfer alone remembers.
      if (job.transfer->remote() && !job.transfer->remote()->lease)
        lane.impossible.emplace_back(job.transfer->remote()->key, rail.port_bit);
    }
    return retry(chunk, status);
  }
  if (status == Errc::unknown_region && job.transfer->remote())
    lane.record->forget_region(job.transfer->remote()->name, job.transfer->remote()->key);
  // Transports do not tell a lease that is over from any other region that is not there any more.
  const bool lease_over = status == Errc::unknown_region && job.transfer->remote() && job.transfer->remote()->lease;
  const Status told = lease_over ? Status(Errc::access_denied, "the lease has ended or was revoked") : status;
  const Status final =
      told.with_context(fmt::format("{} over rail {} ({})", describe(job), rail.spec.rail, rail.spec.transport));
  free_chunk(chunk);
  // The rest is let run out undisturbed: a wrong slice must not cost others their channel.
  begin_end(job, final, std::max<Duration>(job.transfer->deadline() - now_, parts_.config->drain_grace));
}

void PollerCore::retry(Chunk& chunk, const Status& status) {
  Job& job = *chunk.job;
  job.last_error = status;
  // A channel that breaks fails all that it carried at once: one failure, however many items.
  if (chunk.post_number > job.failures_until) {
    ++job.failures;
    job.failures_until = last_post_;
  }
  if (job.failures > max_failures) {
    const Status final = status.with_context(fmt::format("{} failed {} times, last", describe(job), job.failures));
    free_chunk(chunk);
    return begin_end(job, final, parts_.config->drain_grace);
  }
  parts_.metrics->items_retried.fetch_add(1, std::memory_order_relaxed);
  job.waiting.push_back(&chunk);
  if (chunk.op == Op::send) {
    job.lane->message_retry.push_back(&chunk);
  } else {
    enqueue(job);
  }
}

void PollerCore::advance(Job& job) {
  if (job.outstanding > 0) return;
  if (!job.ending.is_ok()) return finish(job, job.ending);
  if (!job.waiting.empty() || !job.cursor.at_end()) {
    if (job.transfer->op() != Op::send) enqueue(job);
    return;
  }
  const TransferState& transfer = *job.transfer;
  if (transfer.op() == Op::write_imm && !job.immediate_sent) {
    Chunk* chunk = new_chunk(job);
    chunk->op = Op::write_imm;
    chunk->sequence = immediate_sequence(*job.transfer);
    job.immediate_sent = true;
    job.waiting.push_back(chunk);
    enqueue(job);
    job.lane->dirty = any_dirty_ = true;
    return;
  }
  finish(job, {});
}

void PollerCore::begin_end(Job& job, Status status, Duration grace) {
  if (!job.ending.is_ok()) {
    // Already ending: only the patience may shrink.
    job.fence_at = std::min(job.fence_at, now_ + grace);
    earliest_fence_ = std::min(earliest_fence_, job.fence_at);
    return;
  }
  job.ending = std::move(status);
  dequeue(job);
  Lane& lane = *job.lane;
  while (!job.waiting.empty()) {
    Chunk* chunk = job.waiting.head;
    job.waiting.remove(chunk);
    std::erase(lane.message_retry, chunk);
    free_chunk(*chunk);
  }
  if (job.transfer->op() == Op::send) std::erase(lane.messages, &job);
  if (job.outstanding == 0) return finish(job, job.ending);
  job.fence_at = now_ + grace;
  earliest_fence_ = std::min(earliest_fence_, job.fence_at);
  for (Chunk* chunk = job.in_flight.head; chunk; chunk = chunk->next)
    chunk->rail->port->port->cancel(chunk->rail->channel, (std::uint64_t{chunk->use} << 32) | chunk->index);
}

void PollerCore::finish(Job& job, Status status) {
  const TransferState* transfer = job.transfer.get();
  const auto latency = std::chrono::duration_cast<std::chrono::nanoseconds>(now_ - transfer->submitted_at).count();
  if (transfer->op() == Op::recv && std::erase(job.lane->receives, &job) > 0) --receives_;
  if (transfer->backlog > 0 && job.lane->record)
    job.lane->record->backlog[parts_.group].fetch_sub(transfer->backlog, std::memory_order_relaxed);
  MetricCounters& metrics = *parts_.metrics;
  if (status.is_ok()) {
    metrics.transfers_ok.fetch_add(1, std::memory_order_relaxed);
    auto& moved = transfer->op() == Op::read ? metrics.bytes_read : metrics.bytes_written;
    moved.fetch_add(transfer->bytes(), std::memory_order_relaxed);
    metrics.latency.record(static_cast<std::uint64_t>(std::max<std::int64_t>(latency, 0)));
  } else {
    metrics.transfers_failed.fetch_add(1, std::memory_order_relaxed);
  }
  TransferState::complete(free_job(job), std::move(status));
}

void PollerCore::orphan(Job& job, const Status& why) {
  if (job.outstanding > 0) {
    // What is under way must be back before another group may start over.
    dequeue(job);
    job.last_error = why;
    for (Chunk* chunk = job.in_flight.head; chunk; chunk = chunk->next)
      chunk->rail->port->port->cancel(chunk->rail->channel, (std::uint64_t{chunk->use} << 32) | chunk->index);
    return;
  }
  const Status named = why.with_context(describe(job));
  const auto& rails = job.lane->rails;
  const bool ruled_out = !rails.empty() && std::all_of(rails.begin(), rails.end(), [&](const auto& rail) {
    return (job.excluded & rail->port_bit) != 0;
  });
  if (ruled_out || !another_group_is_up(*job.lane)) {
    const Status final = named == Errc::channel_error ? Status(Errc::no_path, std::string(named.text())) : named;
    return begin_end(job, final, parts_.config->drain_grace);
  }
  const TransferState* transfer = job.transfer.get();
  dequeue(job);
  while (!job.waiting.empty()) {
    Chunk* chunk = job.waiting.head;
    job.waiting.remove(chunk);
    free_chunk(*chunk);
  }
  if (transfer->backlog > 0 && job.lane->record)
    job.lane->record->backlog[parts_.group].fetch_sub(transfer->backlog, std::memory_order_relaxed);
  parts_.events->orphaned(free_job(job), named);
}

// ---------------------------------------------------------------- rails

void PollerCore::open_rail(std::uint32_t peer, const RailSpec& spec) {
  Lane& lane = lane_of(peer);
  // Connected again before the former connection's work has drained: one after the other.
  if (!lane.closed.is_ok() && lane.record && stopped_.is_ok()) return lane.reopen.push_back(spec);
  const auto slot =
      std::find_if(ports_.begin(), ports_.end(), [&](const auto& port) { return port->name() == spec.transport; });
  if (slot == ports_.end() || !lane.closed.is_ok()) {
    parts_.events->rail_down(peer, spec.rail,
                             lane.closed.is_ok()
                                 ? Status(Errc::no_path, fmt::format("no transport '{}' here", spec.transport))
                                 : lane.closed);
    return;
  }
  auto known = std::find_if(lane.rails.begin(), lane.rails.end(),
                            [&](const auto& rail) { return rail->spec.rail == spec.rail; });
  if (known == lane.rails.end()) {
    lane.rails.push_back(std::make_unique<Rail>());
    known = std::prev(lane.rails.end());
  }
  Rail& rail = **known;
  rail.spec = spec;
  rail.port = slot->get();
  rail.port_bit = rail.port->bit;
  if (!rail.open) try_open(lane, rail);
}

void PollerCore::try_open(Lane& lane, Rail& rail) {
  auto channel = rail.port->port->open(rail.spec.channel);
  if (!channel) {
    rail.last_error = channel.status();
    parts_.events->rail_down(lane.peer, rail.spec.rail, channel.status());
    return;
  }
  rail.channel = *channel;
  rail.open = true;
  rail.port->rails[*channel] = {&lane, &rail};
  parts_.metrics->channels_opened.fetch_add(1, std::memory_order_relaxed);
}

void PollerCore::on_channel(PortSlot& port, ChannelId channel, bool up, const Status& why) {
  const auto found = port.rails.find(channel);
  if (found == port.rails.end()) return;
  const auto [lane, rail] = found->second;
  made_progress_ = true;
  lane->dirty = any_dirty_ = true;
  rail->up = up;
  if (up) return parts_.events->rail_up(lane->peer, rail->spec.rail);
  rail->open = false;
  rail->last_error = why;
  port.rails.erase(found);
  parts_.metrics->channels_lost.fetch_add(1, std::memory_order_relaxed);
  if (lane->closed.is_ok()) parts_.events->rail_down(lane->peer, rail->spec.rail, why);
}

bool PollerCore::no_rail_is_up(const Lane& lane) {
  return std::none_of(lane.rails.begin(), lane.rails.end(), [](const auto& rail) { return rail->up; });
}

Status PollerCore::no_rail_status(const Lane& lane) const {
  std::string text;
  for (const auto& rail : lane.rails)
    text += fmt::format("{}rail {} ({}): {}", text.empty() ? "" : "; ", rail->spec.rail, rail->spec.transport,
                        rail->last_error.is_ok() ? "can not carry it" : rail->last_error.text());
  return {Errc::no_path, fmt::format("no rail to peer '{}' can carry it ({})",
                                     lane.record ? lane.record->name : std::to_string(lane.peer), text)};
}

void PollerCore::close_peer(std::uint32_t peer, const Status& why) {
  const auto found = lanes_.find(peer);
  if (found == lanes_.end()) return;
  Lane& lane = *found->second;
  if (lane.closed.is_ok()) lane.closed = why;
  lane.reopen.clear();
  closing_lanes_ = true;
  // Fence first: completions then come quickly, and cancelling one by one would be work for nothing.
  for (const auto& rail : lane.rails)
    if (rail->open) rail->port->port->fence(rail->channel, why);
  for (Job* job = active_; job;) {
    Job* next = job->next;
    if (job->lane == &lane) begin_end(*job, why, parts_.config->drain_grace);
    job = next;
  }
}

void PollerCore::erase_closed_lanes() {
  closing_lanes_ = false;
  std::vector<std::pair<std::uint32_t, RailSpec>> reopen;
  for (auto place = lanes_.begin(); place != lanes_.end();) {
    const Lane& lane = *place->second;
    if (lane.closed.is_ok()) {
      ++place;
      continue;
    }
    const bool busy = lane.jobs > 0 || std::any_of(lane.rails.begin(), lane.rails.end(),
                                                   [](const auto& rail) { return rail->open || rail->items > 0; });
    closing_lanes_ |= busy;
    if (!busy)
      for (const RailSpec& spec : lane.reopen) reopen.emplace_back(lane.peer, spec);
    place = busy ? std::next(place) : lanes_.erase(place);
  }
  for (const auto& [peer, spec] : reopen) open_rail(peer, spec);
}

void PollerCore::drop_session(SessionId session) {
  for (const auto& slot : ports_) slot->port->drop_session(session);
}

void PollerCore::stop(const Status& why) {
  if (!stopped_.is_ok()) return;
  stopped_ = why;
  std::vector<std::uint32_t> peers;
  peers.reserve(lanes_.size());
  for (const auto& [peer, lane] : lanes_) peers.push_back(peer);
  for (const auto peer : peers) close_peer(peer, why);
}

// ---------------------------------------------------------------- regions

void PollerCore::release_region(RegionKey region, TimePoint now, std::function<void()> done) {
  now_ = std::max(now_, now);
  for (Job* job = active_; job;) {
    Job* next = job->next;
    const RegionRecord* local = job->transfer->local();
    if (local && local->key == region)
      begin_end(
          *job,
          {Errc::cancelled, fmt::format("{}: the local region '{}' was unregistered", describe(*job), local->name)},
          parts_.config->drain_grace);
    job = next;
  }
  releases_.push_back({region, now_ + std::chrono::seconds(1), std::move(done)});
  work_on_releases();
}

void PollerCore::work_on_releases() {
  std::erase_if(releases_, [&](const Release& release) {
    for (Job* job = active_; job; job = job->next)
      if (job->transfer->local() && job->transfer->local()->key == release.region) return false;
    bool quiet = true;
    for (const auto& slot : ports_) quiet &= slot->port->release_region(release.region, now_ >= release.force_at);
    if (quiet) release.done();
    return quiet;
  });
}

// ---------------------------------------------------------------- time

void PollerCore::expire() {
  earliest_deadline_ = TimePoint::max();
  for (Job* job = active_; job;) {
    Job* next = job->next;
    if (job->ending.is_ok()) {
      if (job->transfer->deadline() <= now_) {
        std::string why = fmt::format("{} passed its deadline with {} of {} bytes done", describe(*job),
                                      job->done_bytes, job->transfer->bytes());
        if (!job->last_error.is_ok())
          why += fmt::format("; last error: {}", job->last_error.text());
        else if (job->transfer->op() != Op::recv && no_rail_is_up(*job->lane))
          why += fmt::format("; {}", no_rail_status(*job->lane).text());
        begin_end(*job, {Errc::timed_out, std::move(why)}, parts_.config->drain_grace);
      } else {
        earliest_deadline_ = std::min(earliest_deadline_, job->transfer->deadline());
      }
    }
    job = next;
  }
  made_progress_ = true;
}

void PollerCore::fence_overdue() {
  earliest_fence_ = TimePoint::max();
  for (Job* job = active_; job; job = job->next) {
    if (job->fence_at > now_) {
      earliest_fence_ = std::min(earliest_fence_, job->fence_at);
      continue;
    }
    job->fence_at = TimePoint::max();
    for (Chunk* chunk = job->in_flight.head; chunk; chunk = chunk->next) {
      if (!chunk->rail->up) continue;
      parts_.metrics->fences.fetch_add(1, std::memory_order_relaxed);
      log(LogLevel::info, fmt::format("fencing rail {} to peer '{}' to end {}", chunk->rail->spec.rail,
                                      job->lane->record->name, describe(*job)));
      chunk->rail->port->port->fence(chunk->rail->channel, job->ending);
      chunk->rail->up = false;
    }
  }
}

std::string PollerCore::describe(const Job& job) const {
  const TransferState& transfer = *job.transfer;
  std::string text = fmt::format("{} of {} bytes with peer '{}'", to_string(transfer.op()), transfer.bytes(),
                                 job.lane->record ? job.lane->record->name : std::to_string(job.lane->peer));
  if (transfer.remote())
    text += fmt::format(", region '{}' ({} slices)", transfer.remote()->name, transfer.slices().size());
  return text;
}

Status PollerCore::cancelled(const Job& job) const {
  return {Errc::cancelled, fmt::format("{} was cancelled by its caller", describe(job))};
}

// ---------------------------------------------------------------- bookkeeping

PollerCore::Job* PollerCore::new_job(RefPtr<TransferState> transfer, Lane& lane) {
  if (free_jobs_.empty()) free_jobs_.push_back(&job_storage_.emplace_back());
  Job* job = free_jobs_.back();
  free_jobs_.pop_back();
  job->cursor = SliceCursor(transfer->slices());
  transfer->owner_data = job;
  transfer->carrier.store(this, std::memory_order_relaxed);
  job->transfer = std::move(transfer);
  job->lane = &lane;
  job->order = next_order_++;
  job->next = active_;
  if (active_) active_->previous = job;
  active_ = job;
  ++active_count_;
  ++lane.jobs;
  return job;
}

RefPtr<TransferState> PollerCore::free_job(Job& job) {
  dequeue(job);
  --job.lane->jobs;
  if (!job.lane->closed.is_ok()) closing_lanes_ = true;
  (job.previous ? job.previous->next : active_) = job.next;
  if (job.next) job.next->previous = job.previous;
  --active_count_;
  RefPtr<TransferState> transfer = std::move(job.transfer);
  transfer->owner_data = nullptr;
  transfer->carrier.store(nullptr, std::memory_order_relaxed);
  job = Job{};
  free_jobs_.push_back(&job);
  return transfer;
}

PollerCore::Chunk* PollerCore::new_chunk(Job& job) {
  if (free_chunks_.empty()) {
    Chunk& fresh = chunk_storage_.emplace_back();
    fresh.index = static_cast<std::uint32_t>(chunk_storage_.size() - 1);
    free_chunks_.push_back(&fresh);
  }
  Chunk* chunk = free_chunks_.back();
  free_chunks_.pop_back();
  chunk->job = &job;
  return chunk;
}

void PollerCore::free_chunk(Chunk& chunk) {
  const std::uint32_t index = chunk.index;
  const std::uint32_t use = chunk.use + 1;
  chunk = Chunk{};
  chunk.index = index;
  chunk.use = use;
  free_chunks_.push_back(&chunk);
}

void PollerCore::enqueue(Job& job) {
  if (job.queued) return;
  job.queued = true;
  job.lane->queues[static_cast<std::size_t>(job.transfer->priority())].insert(&job);
}

void PollerCore::dequeue(Job& job) {
  if (!job.queued) return;
  job.queued = false;
  job.lane->queues[static_cast<std::size_t>(job.transfer->priority())].erase(&job);
}

}  // namespace kvferry
