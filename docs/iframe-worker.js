// Browsers allow no Worker in a page that was opened from disk, so there the script of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.queue.splice(0).forEach(this.deliver);
      };
      inside.document.write("<html><body></body></html>");
      inside.document.close();
      inside.document.body.appendChild(script);
    }

    postMessage(data) {
      if (this.deliver) this.deliver(data);
      else this.queue.push(data);
    }
  };
}
