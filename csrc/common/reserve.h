// Reserves room for one more element, so that a later push_back cannot throw and nothing must be undone:
//
//   reserve_one(holders);
//   acquire(thing);
//   holders.push_back(thing);   // does not throw
#pragma once

#include <vector>

namespace patrickstar {

template <typename T>
void reserve_one(std::vector<T>& elements) {
  if (elements.size() == elements.capacity()) elements.reserve(2 * elements.size() + 4);
}

}  // namespace patrickstar
