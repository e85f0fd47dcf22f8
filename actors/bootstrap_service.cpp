#include <utility>

#include <fmt/format.h>

#include <kvferry/actors/bootstrap_service.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {

void BootstrapService::set_ports(std::vector<PortAdvert> ports) { ports_ = std::move(ports); }

std::optional<std::string> BootstrapService::answer(
    std::span<const std::byte> bytes, TimePoint now,
    const std::function<void(std::uint64_t, Result<std::string>)>& later) {
  auto message = decode(bytes);
  if (!message) {
    parts_.metrics->malformed_messages.fetch_add(1, std::memory_order_relaxed);
    log(LogLevel::info, fmt::format("dropped a control message: {}", message.status().text()));
    // Another schema can still be told why; noise gets no answer.
    if (message.status() == Errc::version_mismatch)
      return encode({0, refuse(Errc::version_mismatch, std::string(message.status().text()))});
    return std::nullopt;
  }
  const ControlBody& body = message->body;
  if (const auto* hello = std::get_if<HelloMessage>(&body)) return encode({message->id, reply(*hello, now)});
  if (const auto* ping = std::get_if<PingMessage>(&body)) return encode({message->id, reply(*ping, now)});
  if (const auto* find = std::get_if<FindRegionMessage>(&body)) return encode({message->id, reply(*find, now)});
  if (const auto* channel = std::get_if<ChannelMessage>(&body)) {
    if (!parts_.peers->touch_session(channel->incarnation, now))
      return encode({message->id, refuse(Errc::access_denied, "only a connected engine may open channels")});
    if (!parts_.serve_port || !later)
      return encode({message->id, refuse(Errc::unsupported, "this engine opens no channels on request")});
    parts_.serve_port(*channel,
                      [later, id = message->id](Result<std::string> served) { later(id, std::move(served)); });
    return std::nullopt;
  }
  if (const auto* bye = std::get_if<ByeMessage>(&body))
    end_session(bye->incarnation, {Errc::peer_lost, "the peer's engine ended"});
  return std::nullopt;
}

std::string BootstrapService::encode_port_answer(std::uint64_t id, const Result<std::string>& answer) {
  if (answer) return encode({id, ChannelAnswerMessage{*answer}});
  std::string text(answer.status().text());
  if (text.size() > max_control_string) text.resize(max_control_string);
  return encode(
      {id, RefusedMessage{protocol_version, static_cast<std::uint32_t>(answer.status().code()), std::move(text)}});
}

ControlBody BootstrapService::reply(const HelloMessage& hello, TimePoint now) {
  if (hello.protocol != protocol_version)
    return refuse(Errc::version_mismatch,
                  fmt::format("engine '{}' speaks protocol version {}, engine '{}' speaks {}: use the same release of "
                              "kvferry on both sides",
                              hello.name, hello.protocol, parts_.identity.name, protocol_version));
  if (hello.name.empty() || hello.name.size() > 255 || hello.incarnation == 0)
    return refuse(Errc::malformed, "a hello needs a name of 1-255 bytes and an incarnation other than 0");
  if (ports_.empty())
    return refuse(Errc::unreachable, fmt::format("engine '{}' has no data port open", parts_.identity.name));
  const auto peer = parts_.peers->find_or_add(hello.name, hello.incarnation);
  WelcomeMessage welcome;
  welcome.name = parts_.identity.name;
  welcome.incarnation = parts_.identity.incarnation;
  welcome.host_id = parts_.identity.host_id;
  welcome.data_host = parts_.identity.data_host;
  welcome.token = parts_.peers->open_session(peer, now);
  welcome.ports = ports_;
  for (const auto& record : parts_.regions->all())
    if (!record->lease) welcome.regions.push_back(describe(*record));
  log(LogLevel::info, fmt::format("engine '{}' connected", hello.name));
  return welcome;
}

ControlBody BootstrapService::reply(const PingMessage& ping, TimePoint now) {
  return PongMessage{parts_.identity.incarnation, parts_.peers->touch_session(ping.incarnation, now)};
}

ControlBody BootstrapService::reply(const FindRegionMessage& find, TimePoint now) {
  if (!parts_.peers->touch_session(find.incarnation, now))
    return refuse(Errc::access_denied, "only a connected engine may ask for regions");
  const auto record = parts_.regions->find_name(find.name);
  if (!record) return RegionMessage{};
  if (record->lease) {
    const auto peer = parts_.peers->find_life(find.incarnation);
    if (Status status = record->lease->check(peer ? peer->slot : 0, now); !status)
      return RefusedMessage{protocol_version, static_cast<std::uint32_t>(status.code()), std::string(status.text())};
  }
  return RegionMessage{true, describe(*record)};
}

ControlBody BootstrapService::refuse(Errc code, std::string text) {
  parts_.metrics->handshakes_refused.fetch_add(1, std::memory_order_relaxed);
  log(LogLevel::info, fmt::format("refused a control message: {}", text));
  // It may quote a name that is as long as a string can be, and must be readable itself.
  if (text.size() > max_control_string) text.resize(max_control_string);
  return RefusedMessage{protocol_version, static_cast<std::uint32_t>(code), std::move(text)};
}

void BootstrapService::expire_sessions(TimePoint limit) {
  for (const auto& peer : parts_.peers->silent_sessions(limit))
    end_session(peer->incarnation,
                {Errc::peer_lost, fmt::format("peer '{}' gave no sign of life for too long", peer->name)});
}

void BootstrapService::end_session(std::uint64_t incarnation, const Status& why) {
  const auto peer = parts_.peers->find_life(incarnation);
  if (!peer || !parts_.peers->close_session(incarnation)) return;
  parts_.drop_session(peer->slot, why);
}

RemoteRegion BootstrapService::describe(const RegionRecord& record) const {
  RemoteRegion region;
  region.key = record.key;
  region.name = record.name;
  region.size = record.size;
  region.kind = record.kind;
  region.access = record.access;
  region.descriptors = parts_.descriptors(record.key);
  if (record.lease) describe_lease(record.lease->ranges, region);
  return region;
}

}  // namespace kvferry
