#include "bench/control.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netdb.h>
#include <nlohmann/json.hpp>
#include <sys/socket.h>
#include <unistd.h>

#include <kvferry/transports/transport.hpp>

#include "bench/file_descriptor.hpp"
#include "bench/floor_service.hpp"

namespace kvferry::bench {
namespace {

Status bad_message(std::string_view why) {
  return {Errc::malformed, fmt::format("a control message of transfer_bench is wrong: {}", why)};
}

bool is_true(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_boolean() && found->get<bool>();
}

/// A descriptor or port of the target's process, or -1.
int small_number(const Json& json, const char* key) {
  const auto value = number_field(json, key);
  return value && *value <= INT32_MAX ? static_cast<int>(*value) : -1;
}

bool overflows(const Workload& workload) {
  const double bytes = 2.0 * static_cast<double>(workload.block_size) * workload.batch_size * workload.parts;
  return bytes > 0x1p62;
}

}  // namespace

std::optional<std::uint64_t> number_field(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number_unsigned()) return std::nullopt;
  return found->get<std::uint64_t>();
}

std::string text_field(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

std::vector<std::byte> encode(const Json& message) {
  const std::vector<std::uint8_t> packed = Json::to_msgpack(message);
  std::vector<std::byte> bytes(packed.size());
  std::memcpy(bytes.data(), packed.data(), packed.size());
  return bytes;
}

Result<Json> decode(std::span<const std::byte> bytes) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  Json message = Json::from_msgpack(first, first + bytes.size(), true, false);
  if (message.is_discarded()) return bad_message("it is not MessagePack");
  if (!message.is_object()) return bad_message("it is not a map");
  return message;
}

Json to_json(const Workload& workload) {
  return {{"pattern", to_string(workload.pattern)},
          {"block_size", workload.block_size},
          {"batch_size", workload.batch_size},
          {"parts", workload.parts},
          {"seed", workload.seed}};
}

Result<Workload> workload_from(const Json& json) {
  if (!json.is_object()) return bad_message("the workload is not a map");
  const auto name = json.find("pattern");
  if (name == json.end() || !name->is_string()) return bad_message("the workload has no pattern");
  auto pattern = parse_pattern(name->get_ref<const std::string&>());
  if (!pattern) return pattern.status();
  const auto block_size = number_field(json, "block_size");
  const auto batch_size = number_field(json, "batch_size");
  const auto parts = number_field(json, "parts");
  const auto seed = number_field(json, "seed");
  if (!block_size || !batch_size || !parts || !seed) return bad_message("the workload lacks a number");
  if (*batch_size > UINT32_MAX || *parts > UINT32_MAX) return bad_message("the workload is too large");
  const Workload workload{*pattern, *block_size, static_cast<std::uint32_t>(*batch_size),
                          static_cast<std::uint32_t>(*parts), *seed};
  if (overflows(workload)) return bad_message("the workload is too large");
  return workload;
}

Status Conversation::send(const Json& message) {
  const Transfer transfer = engine_.send(outgoing_, encode(message), {.deadline = answer_limit});
  return transfer.wait();
}

Result<Json> Conversation::receive(Duration limit) {
  buffer_.resize(max_message_bytes);
  const Transfer transfer = engine_.recv(incoming_, buffer_, {.deadline = limit});
  if (auto status = transfer.wait(); !status) return status;
  return decode(std::span(buffer_).first(transfer.bytes()));
}

Result<ControlClient> ControlClient::connect(Engine& engine, const std::string& address) {
  auto outgoing = engine.connect(address);
  if (!outgoing) return outgoing.status();
  // The greeting goes out before the way back exists: the target connects back because of it.
  const Json hello = {{"type", "hello"}, {"id", 0}, {"version", control_version}, {"address", engine.address()}};
  if (auto status = Conversation(engine, *outgoing, Peer()).send(hello); !status) return status;
  auto incoming = engine.accept(outgoing->name(), std::chrono::seconds(10));
  if (!incoming) {
    return incoming.status().with_context(
        fmt::format("the target at {} did not connect back to {}", address, engine.address()));
  }
  ControlClient client(engine, Conversation(engine, *outgoing, *incoming));
  if (auto welcome = client.conversation_.receive(answer_limit); !welcome) return welcome.status();
  return client;
}

Result<Json> ControlClient::ask(std::string_view type, Json request) {
  const std::uint64_t id = ++next_id_;
  request["type"] = type;
  request["id"] = id;
  if (auto status = conversation_.send(request); !status) return status.with_context(fmt::format("asking to {}", type));
  auto answer = conversation_.receive(answer_limit);
  if (!answer) return answer.status().with_context(fmt::format("waiting for the answer to {}", type));
  if (number_field(*answer, "id") != id)
    return bad_message(fmt::format("the answer to {} belongs to another question", type));
  if (is_true(*answer, "ok")) return answer;
  return Status(Errc::internal, fmt::format("the target could not {}: {}", type, text_field(*answer, "error")));
}

Status ControlClient::ask(std::string_view type) { return ask(type, Json::object()).status(); }

Result<std::string> ControlClient::ask_mismatch(std::string_view type, Json request) {
  auto answer = ask(type, std::move(request));
  if (!answer) return answer.status();
  return text_field(*answer, "mismatch");
}

Result<TargetRegion> ControlClient::prepare(std::uint64_t bytes) {
  auto answer = ask("prepare", {{"bytes", bytes}});
  if (!answer) return answer.status();
  auto handle = engine_->find_region(peer(), text_field(*answer, "region"));
  if (!handle) return handle.status();
  if (handle->size() < bytes) return bad_message("the target's region is smaller than asked for");
  return TargetRegion{*handle, small_number(*answer, "pid"), small_number(*answer, "memfd")};
}

Status ControlClient::fill(const Workload& workload, std::uint64_t round) {
  return ask("fill", {{"workload", to_json(workload)}, {"round", round}}).status();
}

Status ControlClient::poison(const Workload& workload) {
  return ask("poison", {{"workload", to_json(workload)}}).status();
}

Status ControlClient::fill_pool(std::uint64_t block_size, std::uint64_t blocks, std::uint64_t seed) {
  return ask("fill_pool", {{"block_size", block_size}, {"blocks", blocks}, {"seed", seed}}).status();
}

Result<std::string> ControlClient::verify(const Workload& workload, std::uint64_t round) {
  return ask_mismatch("verify", {{"workload", to_json(workload)}, {"round", round}});
}

Status ControlClient::reset_notifications() { return ask("reset_notifications"); }

Result<std::string> ControlClient::verify_notifications(std::uint64_t count) {
  return ask_mismatch("verify_notifications", {{"count", count}});
}

Status ControlClient::start_echo() { return ask("echo"); }

Status ControlClient::end_echo() { return engine_->send(peer(), {}, {.deadline = answer_limit}).wait(); }

Result<FloorService> ControlClient::open_floor(const FloorRequest& request) {
  auto answer = ask("open_floor", to_json(request));
  if (!answer) return answer.status();
  return FloorService{number_field(*answer, "floor").value_or(0), small_number(*answer, "port"),
                      small_number(*answer, "memfd")};
}

Status ControlClient::close_floor(std::uint64_t id) { return ask("close_floor", {{"floor", id}}).status(); }

Status ControlClient::bye() { return ask("bye"); }

std::string host_of(const std::string& endpoint) {
  const auto scheme = endpoint.find("://");
  const auto begin = scheme == std::string::npos ? 0 : scheme + 3;
  std::string host = endpoint.substr(begin, endpoint.rfind(':') - begin);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') return host.substr(1, host.size() - 2);
  return host;
}

Result<std::string> host_towards(const std::string& endpoint) {
  const std::string host = host_of(endpoint);
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), "9", &hints, &found); error != 0) {
    return Status(Errc::unreachable, fmt::format("{} does not resolve: {}", host, gai_strerror(error)));
  }
  // Connecting a datagram socket sends nothing: it only asks the routing table.
  const FileDescriptor socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const int connected = ::connect(socket.get(), found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  char text[INET6_ADDRSTRLEN + 16] = {};
  if (connected != 0 || getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return Status(Errc::unreachable, fmt::format("there is no route to {}: {}", host, std::strerror(errno)));
  }
  return own.ss_family == AF_INET6 ? fmt::format("[{}]", text) : std::string(text);
}

}  // namespace kvferry::bench
