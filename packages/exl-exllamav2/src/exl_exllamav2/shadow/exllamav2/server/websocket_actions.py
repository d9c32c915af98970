"""Actions of the WebSocket server."""

from exl_exllamav2.websocket import dispatch
