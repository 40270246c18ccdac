"""Shell texts for a sandbox that takes whatever it can get, each for ever."""

ATTACKS = {
    "busy loops": "for i in 1 2 3 4; do (while :; do :; done) & done; wait",
    "a fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 600",
    "out of memory": "while :; do python3 -c 'a = []\nwhile True: a.append(bytes(1 << 20))'; done",
    "a full disk": "while :; do dd if=/dev/zero of=/home/user/fill bs=1M conv=fsync 2>/dev/null; done",
}
