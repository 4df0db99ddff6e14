#include "collective/communicator.h"

#include "common/check.h"

namespace patrickstar {

namespace {

void check_messages(const Communicator& communicator, const char* what, const std::vector<PeerBytes>& messages) {
  const int rank = communicator.rank();
  const int size = communicator.size();
  for (const PeerBytes& message : messages) {
    PS_CHECK(size > 1, ArgumentError, what, " rank ", message.peer,
             ", but the group has one rank; leave the exchange out");
    PS_CHECK(0 <= message.peer && message.peer < size && message.peer != rank, ArgumentError, what, " rank ",
             message.peer, ", on rank ", rank, " of ", size, "; give another rank, from 0 to ", size - 1);
    PS_CHECK(message.num_bytes >= 0, ArgumentError, what, " rank ", message.peer, " a message of ", message.num_bytes,
             " bytes; give at least 0");
  }
}

}  // namespace

std::string describe_member(const Members& members, int rank, int size) {
  if (members.empty()) return detail::join("rank ", rank, " of ", size);
  return detail::join("rank ", members.at(static_cast<size_t>(rank)), " of a group of ", size);
}

void check_members(const Members& members, int size) {
  PS_CHECK(members.empty() || members.size() == static_cast<size_t>(size), ArgumentError, "members has ",
           members.size(), " numbers, but the group has ", size, " ranks; give one for each, or none");
}

void check_exchange(const Communicator& communicator, const std::vector<PeerBytes>& sends,
                    const std::vector<PeerBytes>& receives) {
  check_messages(communicator, "an exchange sends to", sends);
  check_messages(communicator, "an exchange receives from", receives);
}

}  // namespace patrickstar
