#include <algorithm>
#include <cstring>

#include <kvferry/transports/verbs/cm_wire.hpp>
#include <kvferry/transports/verbs/little_endian.hpp>

namespace kvferry::verbs {
namespace {

// The first byte: another version of these layouts, or data that is none of kvferry's, is told apart by it.
enum class Kind : std::uint8_t { call = 0x4b, reply = 0x4c, refusal = 0x4d };

constexpr std::size_t call_bytes = 1 + sizeof(Token) + 8 + 8 + 2 + 1 + 1 + 1;
constexpr std::size_t reply_bytes = 1 + 2 + 1 + 2 + 2;
constexpr std::size_t refusal_head_bytes = 1 + 2 + 1;
static_assert(call_bytes <= most_call_bytes);

PrivateData begin(Kind kind, std::size_t bytes, std::byte*& at) {
  PrivateData data(bytes);
  at = data.data();
  put(at, static_cast<std::uint8_t>(kind));
  return data;
}

/// Where the fields begin; nullptr when it is something else.
const std::byte* fields(std::span<const std::byte> data, Kind kind, std::size_t bytes) {
  if (data.size() < bytes || data[0] != static_cast<std::byte>(kind)) return nullptr;
  return data.data() + 1;
}

template <class T>
std::uint32_t number(const std::byte*& from) {
  T value = 0;
  get(from, value);
  return value;
}

Status malformed(const char* what) {
  return {Errc::malformed, std::string("verbs: the peer's connection data (librdmacm): ") + what};
}

}  // namespace

PrivateData encode(const CmCall& call) {
  std::byte* at = nullptr;
  PrivateData data = begin(Kind::call, call_bytes, at);
  at = std::copy(call.token.begin(), call.token.end(), at);
  put(at, call.target_incarnation);
  put(at, call.channel);
  put(at, static_cast<std::uint16_t>(call.mtu));
  put(at, static_cast<std::uint8_t>(call.read_depth));
  put(at, static_cast<std::uint8_t>(call.index));
  put(at, static_cast<std::uint8_t>(call.pairs));
  return data;
}

Result<CmCall> decode_call(std::span<const std::byte> data) {
  const std::byte* at = fields(data, Kind::call, call_bytes);
  if (at == nullptr) return malformed("not a request of this version of kvferry");
  CmCall call;
  std::copy_n(at, call.token.size(), call.token.begin());
  at += call.token.size();
  get(at, call.target_incarnation);
  get(at, call.channel);
  call.mtu = number<std::uint16_t>(at);
  call.read_depth = number<std::uint8_t>(at);
  call.index = number<std::uint8_t>(at);
  call.pairs = number<std::uint8_t>(at);
  if (call.pairs < 2 || call.pairs > most_pairs || call.index >= call.pairs)
    return malformed("the number of queue pairs");
  return call;
}

PrivateData encode(const CmReply& reply) {
  std::byte* at = nullptr;
  PrivateData data = begin(Kind::reply, reply_bytes, at);
  put(at, static_cast<std::uint16_t>(reply.mtu));
  put(at, static_cast<std::uint8_t>(reply.read_depth));
  put(at, static_cast<std::uint16_t>(reply.notifications));
  put(at, static_cast<std::uint16_t>(reply.messages));
  return data;
}

Result<CmReply> decode_reply(std::span<const std::byte> data) {
  const std::byte* at = fields(data, Kind::reply, reply_bytes);
  if (at == nullptr) return malformed("not an answer of this version of kvferry");
  CmReply reply;
  reply.mtu = number<std::uint16_t>(at);
  reply.read_depth = number<std::uint8_t>(at);
  reply.notifications = number<std::uint16_t>(at);
  reply.messages = number<std::uint16_t>(at);
  if (reply.notifications == 0 || reply.messages == 0) return malformed("its limits");
  return reply;
}

PrivateData encode_refusal(const Status& why) {
  const std::size_t length = std::min(why.text().size(), most_refusal_bytes - refusal_head_bytes);
  std::byte* at = nullptr;
  PrivateData data = begin(Kind::refusal, refusal_head_bytes + length, at);
  put(at, static_cast<std::uint16_t>(why.code()));
  put(at, static_cast<std::uint8_t>(length));
  std::memcpy(at, why.text().data(), length);
  return data;
}

Status decode_refusal(std::span<const std::byte> data) {
  const std::byte* at = fields(data, Kind::refusal, refusal_head_bytes);
  if (at == nullptr) return malformed("a refusal without a reason");
  const std::uint32_t code = number<std::uint16_t>(at);
  const std::size_t length = std::min<std::size_t>(number<std::uint8_t>(at), data.size() - refusal_head_bytes);
  if (code == 0 || code > static_cast<std::uint32_t>(Errc::internal)) return malformed("a refusal's code");
  return {static_cast<Errc>(code), std::string(reinterpret_cast<const char*>(at), length)};
}

}  // namespace kvferry::verbs
