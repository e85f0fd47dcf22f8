#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/verbs/server.hpp>

namespace kvferry::verbs {
namespace {

constexpr std::uint32_t answer_depth = 16;  // requests in flight of a pair that mostly serves
constexpr std::size_t most_numbers = (small_bytes - head_bytes) / sizeof(std::uint32_t);
constexpr std::size_t most_served = 16384;

}  // namespace

// ---------------------------------------------------------------- Served

Served::~Served() {
  cm_ids_.clear();
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

Status Served::prepare(const ConnectRequest& request) {
  side_ = parts_.sides[request.device].get();
  const Device& device = side_->device;
  route_.lid = request.lid;
  route_.gid = request.gid;
  route_.gid_index = request.gid_index;
  route_.global = request.global;
  route_.mtu = std::min(request.mtu, device.mtu);
  const auto served = static_cast<std::uint32_t>(std::clamp(device.context->limits().max_qp_rd_atom, 1, 16));
  route_.reads_served = std::clamp(request.read_depth, 1u, served);
  route_.reads_out = 0;
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
  }
  return {};
}

Result<ConnectAnswer> Served::connect(const ConnectRequest& request) {
  ConnectAnswer answer{route_.mtu, route_.reads_served, notification_credits, message_credits, {}};
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    route_.peer = request.pairs[i];
    if (Status status = pairs_[i]->pair().connect(route_, parts_.config); !status) return status;
    answer.pairs.push_back(pairs_[i]->pair().address());
  }
  return answer;
}

Status Served::accept(std::unique_ptr<CmId>& id, std::uint32_t index) {
  if (index >= pairs_.size() || cm_ids_.contains(index))
    return {Errc::malformed, fmt::format("verbs: queue pair {} of the channel is connected already, or none", index)};
  QueuePair& pair = pairs_[index]->pair();
  PairRoute route = route_;
  if (Status status = id->complete(route); !status) return status;
  if (Status status = pair.connect(route, parts_.config); !status) return status;
  const CmReply reply{route.mtu, route.reads_served, notification_credits, message_credits};
  if (Status status = id->accept(pair, route.reads_served, encode(reply)); !status) return status;
  id->set_tag(wire_id_);
  cm_ids_.emplace(index, std::move(id));
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
  const auto asked = decode_connect_request(request);
  if (!asked) return asked.status();
  const auto served = admit(*asked);
  if (!served) return served.status();
  const auto answer = (*served)->connect(*asked);
  if (answer) return encode(*answer);
  remove(asked->channel);
  return answer.status();
}

/// Makes a channel for whoever may have one.
Result<Served*> Server::admit(const ConnectRequest& request) {
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
  if (Status status = served->prepare(request); !status) return status;
  return channels_.emplace(request.channel, std::move(served)).first->second.get();
}

// ---------------------------------------------------------------- through librdmacm

void Server::on_cm_request(std::unique_ptr<CmId> id, const CmEvent& event) {
  if (Status status = accept(id, event); !status) {
    log(LogLevel::info, fmt::format("verbs: a connection through librdmacm is refused: {}", status.text()));
    id->reject(encode_refusal(status));
  }
}

Status Server::accept(std::unique_ptr<CmId>& id, const CmEvent& event) {
  const auto call = decode_call(event.private_data());
  if (!call) return call.status();
  const auto served = served_by(*id, *call);
  if (!served) return served.status();
  const Status status = (*served)->accept(id, call->index);
  if (status) ++half_open_;
  if (!status && !(*served)->called()) remove(call->channel);
  return status;
}

/// The channel that the call belongs to. The first of a channel's calls makes it.
Result<Served*> Server::served_by(const CmId& id, const CmCall& call) {
  const auto side =
      std::find_if(parts_.sides.begin(), parts_.sides.end(), [&](const auto& one) { return id.is_on(one->device); });
  if (side == parts_.sides.end())
    return {Errc::no_path, fmt::format("verbs: the peer does not use {}, where the request arrived", id.place())};
  const auto found = channels_.find(call.channel);
  if (found != channels_.end()) {
    const auto session = parts_.events.authorize(call.token);
    if (session && *session == found->second->session() && found->second->side() == side->get())
      return found->second.get();
    return {Errc::access_denied, "verbs: the channel is another engine's, or on another device"};
  }
  ConnectRequest request;
  request.token = call.token;
  request.target_incarnation = call.target_incarnation;
  request.channel = call.channel;
  request.device = (*side)->index;
  request.mtu = call.mtu;
  request.read_depth = call.read_depth;
  request.pairs.resize(call.pairs);
  return admit(request);
}

void Server::on_cm_event(CmId& id, const CmEvent& event) {
  if (ends_connection(event.type)) return remove(id.tag());
  const auto found = channels_.find(id.tag());
  if (event.type != RDMA_CM_EVENT_ESTABLISHED || found == channels_.end()) return;
  found->second->on_established();
  --half_open_;
}

// ---------------------------------------------------------------- arrivals

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
  half_open_ -= found->second->half_open();
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
