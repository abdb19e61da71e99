package httpapi

// MaxBody is the maximum size of most bodies.
const MaxBody = maxBody

const MaxPeerConns = maxPeerConns
