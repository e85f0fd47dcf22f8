#include "wire.hpp"

#include <algorithm>

namespace kvferry::tcp {
namespace {

constexpr std::uint32_t hello_magic = 0x4846564b;  // "KVFH"
constexpr std::uint32_t reply_magic = 0x5246564b;  // "KVFR"

std::optional<Errc> decode_status(const std::byte* from) noexcept {
  const auto value = load<std::uint16_t>(from);
  if (value > static_cast<std::uint16_t>(Errc::internal)) return std::nullopt;
  return static_cast<Errc>(value);
}

bool counts_are_possible(const Request& request) noexcept {
  switch (request.op) {
    case Op::read:
    case Op::write:
    case Op::write_imm:
      return request.descriptors <= max_descriptors && request.payload_bytes >= request.descriptors &&
             (request.payload_bytes == 0 || request.descriptors > 0);
    case Op::send:
      return request.descriptors == 0 && request.payload_bytes <= max_message_bytes;
    case Op::recv:
      break;
  }
  return false;
}

}  // namespace

void encode(const Hello& hello, std::byte* to) noexcept {
  store(to, hello_magic);
  store(to + 4, protocol_version);
  store(to + 6, static_cast<std::uint8_t>(hello.purpose));
  store(to + 7, hello.socket_index);
  std::copy(hello.token.begin(), hello.token.end(), to + 8);
  store(to + 24, hello.incarnation);
  store(to + 32, hello.nonce);
}

void encode(const HelloReply& reply, std::byte* to) noexcept {
  store(to, reply_magic);
  store(to + 4, reply.version);
  store(to + 6, static_cast<std::uint16_t>(reply.status));
  store(to + 8, reply.text_bytes);
  store(to + 10, std::uint16_t{0});
}

void encode(const Request& request, std::byte* to) noexcept {
  store(to, static_cast<std::uint32_t>(request.op));
  store(to + 4, request.id);
  store(to + 8, request.region.slot);
  store(to + 12, request.region.generation);
  store(to + 16, request.descriptors);
  store(to + 20, request.immediate);
  store(to + 24, request.sequence);
  store(to + 32, request.payload_bytes);
}

void encode(const Response& response, std::byte* to) noexcept {
  store(to, response.id);
  store(to + 4, static_cast<std::uint16_t>(response.status));
  store(to + 6, response.text_bytes);
  store(to + 8, response.payload_bytes);
}

std::optional<std::uint16_t> decode_hello_version(const std::byte* from) noexcept {
  if (load<std::uint32_t>(from) != hello_magic) return std::nullopt;
  return load<std::uint16_t>(from + 4);
}

std::optional<Hello> decode_hello(const std::byte* from) noexcept {
  if (decode_hello_version(from) != protocol_version) return std::nullopt;
  Hello hello;
  hello.purpose = static_cast<Purpose>(load<std::uint8_t>(from + 6));
  if (hello.purpose != Purpose::data && hello.purpose != Purpose::fence) return std::nullopt;
  hello.socket_index = load<std::uint8_t>(from + 7);
  if (hello.socket_index >= max_sockets) return std::nullopt;
  std::copy_n(from + 8, hello.token.size(), hello.token.begin());
  hello.incarnation = load<std::uint64_t>(from + 24);
  hello.nonce = load<std::uint64_t>(from + 32);
  return hello;
}

std::optional<HelloReply> decode_hello_reply(const std::byte* from) noexcept {
  const std::optional<Errc> status = decode_status(from + 6);
  const auto text_bytes = load<std::uint16_t>(from + 8);
  if (load<std::uint32_t>(from) != reply_magic || !status || text_bytes > max_text_bytes ||
      load<std::uint16_t>(from + 10) != 0) {
    return std::nullopt;
  }
  return HelloReply{load<std::uint16_t>(from + 4), *status, text_bytes};
}

std::optional<Request> decode_request(const std::byte* from) noexcept {
  const auto op = load<std::uint32_t>(from);
  if (op > static_cast<std::uint32_t>(Op::send)) return std::nullopt;
  Request request;
  request.op = static_cast<Op>(op);
  request.id = load<std::uint32_t>(from + 4);
  request.region.slot = load<std::uint32_t>(from + 8);
  request.region.generation = load<std::uint32_t>(from + 12);
  request.descriptors = load<std::uint32_t>(from + 16);
  request.immediate = load<std::uint32_t>(from + 20);
  request.sequence = load<std::uint64_t>(from + 24);
  request.payload_bytes = load<std::uint64_t>(from + 32);
  if (request.id == goodbye_id || !counts_are_possible(request)) return std::nullopt;
  return request;
}

std::optional<Response> decode_response(const std::byte* from) noexcept {
  const std::optional<Errc> status = decode_status(from + 4);
  Response response;
  response.id = load<std::uint32_t>(from);
  response.text_bytes = load<std::uint16_t>(from + 6);
  response.payload_bytes = load<std::uint64_t>(from + 8);
  if (!status || response.text_bytes > max_text_bytes) return std::nullopt;
  response.status = *status;
  const bool failed = *status != Errc::ok;
  if (failed ? response.payload_bytes != 0 : response.text_bytes != 0) return std::nullopt;
  return response;
}

}  // namespace kvferry::tcp
