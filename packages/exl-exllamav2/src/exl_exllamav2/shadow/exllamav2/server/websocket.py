"""WebSocket server."""

from exl_exllamav2.websocket import ExLlamaV2WebSocketServer
