#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/transports/verbs/server.hpp>

namespace kvferry::verbs {
namespace {

constexpr std::uint32_t answer_depth = 16;  // requests in flight of a pair that mostly serves
constexpr std::size_t most_numbers = (small_bytes - head_bytes) / sizeof(std::uint32_t);
constexpr std::size_t most_served = 16384;

}  // namespace

// ---------------------------------------------------------------- Served

Served::~Served() {
  for (const auto& pair : pairs_) {
    if (pair->in_flight() > 0)
      pair->retire(pair->newest(), [this](const Posted& posted, bool) { side_->give_back(posted); });
    parts_.forget(*pair);
  }
  pairs_.clear();
  if (side_ != nullptr) side_->completions->release(reserved_);
  for (const auto* waiting : {&notifications_, &messages_})
    for (const Arrival& arrival : *waiting) arrival.from->post(arrival.buffer);
}

Status Served::connect(const ConnectRequest& request, ConnectAnswer& answer) {
  side_ = parts_.sides[request.device].get();
  const Device& device = side_->device;
  PairRoute route;
  route.lid = request.lid;
  route.gid = request.gid;
  route.gid_index = request.gid_index;
  route.global = request.global;
  route.mtu = std::min(request.mtu, device.mtu);
  const auto served = static_cast<std::uint32_t>(std::clamp(device.context->limits().max_qp_rd_atom, 1, 16));
  route.reads_served = std::clamp(request.read_depth, 1u, served);
  route.reads_out = 0;
  const std::uint32_t entries = answer_depth * static_cast<std::uint32_t>(request.pairs.size());
  if (!side_->completions->reserve(entries))
    return {Errc::resource_exhausted,
            fmt::format("verbs: the completion queue of {} has no room for another channel", device.facts.name())};
  reserved_ = entries;
  for (std::size_t i = 0; i < request.pairs.size(); ++i) {
    const bool for_messages = i + 1 == request.pairs.size();
    PairSpec spec;
    spec.queue = side_->completions->get();
    spec.receives = (for_messages ? side_->large_receives : side_->small_receives)->get();
    spec.depth = answer_depth;
    auto pair = QueuePair::create(device, spec);
    if (!pair) return pair.status();
    pairs_.push_back(std::make_unique<SendQueue>(std::move(*pair), device.context->api(), parts_.new_slot()));
    parts_.watch(*pairs_.back(), *this);
    route.peer = request.pairs[i];
    if (Status status = pairs_.back()->pair().connect(route, parts_.config); !status) return status;
    answer.pairs.push_back(pairs_.back()->pair().address());
  }
  answer.mtu = route.mtu;
  answer.read_depth = route.reads_served;
  answer.notifications = notification_credits;
  answer.messages = message_credits;
  return {};
}

void Served::on_arrival(ReceiveQueue& from, std::uint32_t buffer, const Head& head) {
  const Arrival arrival{&from, buffer, head};
  auto& waiting = head.kind == HeadKind::message ? messages_ : notifications_;
  if (!waiting.empty() || !offer(arrival)) waiting.push_back(arrival);
}

bool Served::offer(const Arrival& arrival) {
  const Head& head = arrival.head;
  const bool taken = head.kind == HeadKind::message
                         ? parts_.events.on_message(session_, head.sequence,
                                                    {arrival.from->data(arrival.buffer) + head_bytes, head.bytes})
                         : parts_.events.on_notification(session_, head.sequence, head.immediate);
  if (!taken) return false;
  arrival.from->post(arrival.buffer);
  taken_.push_back(head.number);
  return true;
}

void Served::offer_all(std::deque<Arrival>& waiting) {
  while (!waiting.empty() && offer(waiting.front())) waiting.pop_front();
}

void Served::tick() {
  offer_all(notifications_);
  offer_all(messages_);
  if (runnable()) report();
}

// One at a time: the next carries all that has come together meanwhile.
void Served::report() {
  SendQueue& sends = *pairs_.front();
  BufferPool& buffers = *side_->small_sends;
  if (buffers.empty() || sends.room() == 0) return;
  const std::size_t count = std::min(taken_.size(), most_numbers);
  const std::uint32_t buffer = buffers.take();
  Head head;
  head.kind = HeadKind::accepted;
  head.immediate = static_cast<std::uint32_t>(count);
  head.channel = wire_id_;
  head.bytes = static_cast<std::uint32_t>(count * sizeof(std::uint32_t));
  encode_head(head, buffers.data(buffer));
  encode_numbers(taken_.begin(), count, buffers.data(buffer) + head_bytes);
  Posted posted;
  posted.small_buffer = buffer;
  ibv_send_wr& request = sends.add(posted);
  request.opcode = IBV_WR_SEND;
  request.sg_list[0] = buffers.piece(buffer, static_cast<std::uint32_t>(head_bytes) + head.bytes);
  request.num_sge = 1;
  if (request.sg_list[0].length <= sends.pair().max_inline()) request.send_flags |= IBV_SEND_INLINE;
  if (sends.post().accepted == 0) {
    buffers.give_back(buffer);
    return;
  }
  taken_.erase(taken_.begin(), taken_.begin() + static_cast<std::ptrdiff_t>(count));
  reporting_ = true;
}

void Served::on_sent(SendQueue& queue, const ibv_wc& completion) {
  // The initiator sees a broken channel itself, and asks for a new one.
  if (completion.status != IBV_WC_SUCCESS) broken_ = true;
  queue.retire(static_cast<std::uint32_t>(completion.wr_id),
               [this](const Posted& posted, bool) { side_->give_back(posted); });
  reporting_ = false;
  if (runnable()) report();
}

// ---------------------------------------------------------------- Server

Result<std::string> Server::serve(std::string_view request) {
  if (is_close_request(request)) {
    const auto close = decode_close_request(request);
    if (!close) return close.status();
    remove(close->channel);
    return std::string();
  }
  const auto connect_request = decode_connect_request(request);
  if (!connect_request) return connect_request.status();
  return connect(*connect_request);
}

Result<std::string> Server::connect(const ConnectRequest& request) {
  if (request.target_incarnation != parts_.context.incarnation)
    return {Errc::stale_peer, fmt::format("verbs: the engine has restarted: life {:016x} was meant, this is {:016x}",
                                          request.target_incarnation, parts_.context.incarnation)};
  const auto session = parts_.events.authorize(request.token);
  if (!session)
    return {Errc::access_denied, "verbs: the token of the request to connect is not that of a connected engine"};
  if (request.device >= parts_.sides.size())
    return {Errc::malformed, fmt::format("verbs: there is no device number {}", request.device)};
  if (channels_.size() >= most_served)
    return {Errc::resource_exhausted, fmt::format("verbs: {} channels are served already", most_served)};
  if (channels_.contains(request.channel)) return {Errc::malformed, "verbs: the channel exists already"};
  auto served = std::make_unique<Served>(*session, request.channel, parts_);
  ConnectAnswer answer;
  if (Status status = served->connect(request, answer); !status) return status;
  channels_.emplace(request.channel, std::move(served));
  return encode(answer);
}

void Server::on_arrival(ReceiveQueue& from, std::uint32_t buffer, const Head& head) {
  const auto found = channels_.find(head.channel);
  if (found == channels_.end()) return from.post(buffer);
  Served& served = *found->second;
  served.on_arrival(from, buffer, head);
  if (served.busy() && std::find(busy_.begin(), busy_.end(), &served) == busy_.end()) busy_.push_back(&served);
}

void Server::remove(std::uint64_t wire_id) {
  const auto found = channels_.find(wire_id);
  if (found == channels_.end()) return;
  std::erase(busy_, found->second.get());
  channels_.erase(found);
}

void Server::drop_session(SessionId session) {
  std::vector<std::uint64_t> gone;
  for (const auto& [id, channel] : channels_)
    if (channel->session() == session) gone.push_back(id);
  for (const std::uint64_t id : gone) remove(id);
}

void Server::tick() {
  for (Served* channel : busy_) channel->tick();
  std::erase_if(busy_, [](const Served* channel) { return !channel->busy(); });
}

bool Server::stalled() const {
  return std::any_of(busy_.begin(), busy_.end(), [](const Served* one) { return one->stalled(); });
}

bool Server::runnable() const {
  return std::any_of(busy_.begin(), busy_.end(), [](const Served* one) { return one->runnable(); });
}

}  // namespace kvferry::verbs
