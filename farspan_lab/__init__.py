"""Several sites on one Linux machine, with the kernel's real network stacks between them."""

#: The interface that carries a site's address. Workers name it in GLOO_SOCKET_IFNAME and its like.
INTERFACE = "wan0"
