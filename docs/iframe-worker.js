// Search from the disk: a browser gives a file no Worker, so the search runs in a hidden frame.
// MkDocs' plugin "offline" would load a script of this name from the web.
if (location.protocol === "file:") window.Worker = window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.body.appendChild(document.createElement("iframe"));
    this.frame.hidden = true;
    this.frame.worker = this;
    const answer = "frameElement.worker.dispatchEvent(new MessageEvent('message', {data: parent.structuredClone(data)}))";
    this.frame.contentDocument.write(`<script>postMessage = data => ${answer}</script><script src="${url}"></script>`);
    this.frame.contentDocument.close();
    this.loaded = new Promise(done => { this.frame.contentWindow.onload = done; });
  }
  async postMessage(data) {
    await this.loaded;
    this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}));
  }
};
