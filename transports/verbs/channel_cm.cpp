// How a channel connects through librdmacm: the way to the address is found, each queue pair calls the
// target's port, and the answers say what the bootstrap's answer says.
#include <algorithm>
#include <cerrno>
#include <chrono>

#include <fmt/format.h>

#include <kvferry/transports/verbs/channel.hpp>
#include <kvferry/transports/verbs/cm_wire.hpp>

namespace kvferry::verbs {
namespace {

// The kernel looks again only then for an answer of ARP that came while it was not looking.
constexpr auto resolve_limit = std::chrono::milliseconds(200);

}  // namespace

Status Channel::ask_cm(const PortAddress& target) {
  const PortFacts& ours = side_->device.facts;
  if (target.cm_port == 0)
    return {Errc::no_path, fmt::format("verbs: verbs.connect is rdmacm here, but the peer does not listen for it: set "
                                       "it there too (KVFERRY_VERBS_CONNECT)")};
  if (!ours.ethernet)
    return {Errc::unsupported, fmt::format("verbs: {} is an InfiniBand port, whose IP addresses are not known: connect "
                                           "it with verbs.connect=bootstrap",
                                           ours.name())};
  cm_port_ = target.cm_port;
  for (std::size_t i = 0; i <= data_.size(); ++i) {
    auto id = parts_.cm->new_id(*this, i);
    if (!id) return id.status();
    cm_ids_.push_back(std::move(*id));
    if (Status status = resolve(*cm_ids_.back()); !status) return status;
  }
  return {};
}

std::string Channel::cm_peer() const { return fmt::format("{} port {}", to_string(route_.gid), cm_port_); }

Status Channel::resolve(CmId& id) {
  return id.resolve_address(request_.gid, route_.gid, cm_port_, parts_.config,
                            std::min(spec_.give_up, Clock::now() + resolve_limit));
}

void Channel::on_cm_event(CmId& id, const CmEvent& event) {
  const bool again = state_ == State::asking && event.type == RDMA_CM_EVENT_ADDR_ERROR && event.status == -ETIMEDOUT &&
                     Clock::now() < spec_.give_up;
  if (ends_connection(event.type) && !again)
    return begin_end(describe_end(event, side_->device.facts.name(), cm_peer()));
  if (state_ != State::asking) return;
  if (Status status = again ? resolve(id) : go_on(id, event); !status) begin_end(status);
}

Status Channel::go_on(CmId& id, const CmEvent& event) {
  switch (event.type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      if (!id.is_on(side_->device))
        return {Errc::no_path, fmt::format("verbs: the way from {} to {} leads through {}, not through {}: look at the "
                                           "routes of this host",
                                           to_string(request_.gid), cm_peer(), id.place(), side_->device.facts.name())};
      return id.resolve_route(spec_.give_up);
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return call(id);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      return join(id, event);
    default:
      return {};
  }
}

Status Channel::call(CmId& id) {
  CmCall call;
  call.token = spec_.token;
  call.target_incarnation = spec_.target_incarnation;
  call.channel = wire_id_;
  call.mtu = route_.mtu;
  call.read_depth = request_.read_depth;
  call.index = static_cast<std::uint32_t>(id.tag());
  call.pairs = static_cast<std::uint32_t>(cm_ids_.size());
  asked_ = true;
  return id.connect(pair_at(id.tag()).pair(), request_.read_depth, parts_.config, encode(call));
}

/// The target has connected its queue pair with ours.
Status Channel::join(CmId& id, const CmEvent& event) {
  const auto reply = decode_reply(event.private_data());
  if (!reply) return reply.status();
  PairRoute route = route_;
  route.mtu = std::min(route_.mtu, reply->mtu);
  route.reads_out = std::clamp(reply->read_depth, 1u, request_.read_depth);
  route.reads_served = 0;
  if (Status status = id.complete(route); !status) return status;
  if (Status status = pair_at(id.tag()).pair().connect(route, parts_.config); !status) return status;
  if (Status status = id.establish(); !status) return status;
  notification_credits_ = reply->notifications;
  message_credits_ = reply->messages;
  if (++joined_ == cm_ids_.size()) begin_proof();
  return {};
}

}  // namespace kvferry::verbs
